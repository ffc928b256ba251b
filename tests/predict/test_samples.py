"""Sample forecasts in a run: what they learn from, what they leave out, and that a run with them resumes exactly."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtrainer import HybridTrainer, HybridTrainerConfig
from hybridtrainer.data.chosen import ChosenLoader
from hybridtrainer.data.endless import endless
from hybridtrainer.data.loader import Given
from hybridtrainer.errors import ForeignCheckpointError, ModelError
from hybridtrainer.losses import CheckedLoss
from hybridtrainer.predict.samples import AHEAD, NO_LOADER, NO_SAMPLES, NOR_WEIGHTS, OTHER_LENGTH, SampleForecasts
from hybridtrainer.records import Notice

COUNT, BATCH = 256, 8
ROUND = 4  # batches


class Numbers:
    """Of two kinds: most are learned at once, every eighth has a target that nothing can foresee."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(COUNT, 4, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True)
        self.hard = torch.arange(COUNT) % 8 == 0
        self.targets[self.hard] = torch.randn(int(self.hard.sum()), 1, generator=generator)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


DATA = Numbers()


def each_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    losses: Tensor = (model(inputs) - targets).square().mean(1)
    return losses


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return each_loss(model, batch).mean()


def make(loss: Any = each_loss, **settings: Any) -> HybridTrainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    options: dict[str, Any] = {"predict": ["samples"], **settings}
    accumulate = options.pop("accumulate", 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return HybridTrainer(model, optimizer, loss, HybridTrainerConfig(**options), accumulate=accumulate)


def train(trainer: HybridTrainer, steps: int, loader: Any = None) -> list[Any]:
    loader = loader or trainer.loader(DATA, BATCH)
    results: list[Any] = []
    while len(results) < steps:
        results += [trainer.step(batch) for batch in islice(loader, steps - len(results))]
    return results


def test_what_is_known_is_left_out_and_what_is_not_is_computed():
    trainer = make()
    loader = trainer.loader(DATA, BATCH)
    assert isinstance(loader, ChosenLoader)
    given: list[int] = []
    ask = loader.given
    loader.given = lambda: _noted(ask(), given)  # type: ignore[method-assign]
    train(trainer, 400, loader)
    late = torch.tensor(given[-1600:])
    assert float(DATA.hard[late].float().mean()) > 0.25  # they are an eighth of the data
    assert len({index for index in late.tolist() if DATA.hard[index]}) >= 0.9 * float(DATA.hard.sum())
    assert loader.taken / loader.passed < 0.5


def told_by(trainer: HybridTrainer) -> list[str]:
    told: list[str] = []
    trainer.listeners.append(lambda record: told.append(record.text) if isinstance(record, Notice) else None)
    return told


def test_with_auto_every_sample_is_computed_until_enough_are_known(tmp_path):
    auto, plain = make(predict="auto"), make(predict="off")
    told = told_by(auto)
    loader = auto.loader(DATA, BATCH)
    assert isinstance(loader, ChosenLoader)
    first = [result.loss for result in train(auto, COUNT // BATCH, loader)]
    assert first == [result.loss for result in train(plain, COUNT // BATCH)]
    assert not told
    auto.save(tmp_path / "before")
    train(auto, 15 * COUNT // BATCH, loader)
    auto.save(tmp_path / "middle")
    train(auto, 15 * COUNT // BATCH, loader)
    assert len(told) > 1
    assert re.match(r"sample forecasts: \d+% of the samples are known, what is known is seldom computed", told[0])
    share = loader.taken / loader.passed
    assert share < 0.7

    for name, passes in (("before", 30), ("middle", 15)):
        other = make(predict="auto")
        said = told_by(other)
        other.load(tmp_path / name)
        again = other.loader(DATA, BATCH)
        assert isinstance(again, ChosenLoader)
        train(other, passes * COUNT // BATCH, again)
        assert again.taken / again.passed == share
        assert other.fingerprint() == auto.fingerprint()
        assert said == told[-len(said) :]  # nothing is said twice


@pytest.mark.parametrize("weighed", [False, True])
def test_a_step_that_was_made_again_in_parts_teaches_each_sample_once(weighed: bool):
    failed: list[int] = []

    def fail(_: Tensor) -> None:
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError

    def hungry(model: nn.Module, batch: Any) -> Tensor:
        losses = each_loss(model, batch)
        if losses.requires_grad:
            losses.register_hook(fail)
        return losses

    trainer = make(hungry, sample_weights=weighed)
    told = told_by(trainer)
    train(trainer, 3)
    assert failed
    ledger = trainer._feed.samples._ledger
    assert ledger is not None
    assert ledger.computed == 3 * BATCH
    assert OTHER_LENGTH not in told


def test_with_auto_samples_that_nothing_can_foresee_are_all_computed():
    def noise(model: nn.Module, batch: Any) -> Tensor:
        return each_loss(model, (batch[0], torch.randn_like(batch[1]) * 3))

    auto = make(noise, predict="auto")
    told = told_by(auto)
    loader = auto.loader(DATA, BATCH)
    train(auto, 10 * COUNT // BATCH, loader)
    assert isinstance(loader, ChosenLoader)
    assert loader.taken == loader.passed
    assert not [text for text in told if text.startswith("sample")]


def test_with_auto_what_is_forgotten_is_computed_again():
    told: list[str] = []
    forecasts = SampleForecasts(CheckedLoss(nn.Linear(1, 1), each_loss, "fp32"), told.append, waits=True)
    forecasts.begin(4)
    ledger, every = forecasts._ledger, torch.arange(4)
    assert ledger is not None
    ledger.learn(every, torch.full((4,), 2.0))
    ledger.learn(every, torch.tensor([0.0, 0.1, 0.1, 2.0]))
    assert forecasts.chances(every, 3, 3) is None  # not before a whole pass
    known = forecasts.chances(every, 4, 4)
    assert known is not None and known.tolist() != [1, 1, 1, 1]
    ledger.learn(every, torch.full((4,), 1.5))
    still = forecasts.chances(every, 7, 6)
    assert still is not None and still.tolist() == [1, 1, 1, 1]
    assert len(told) == 1  # they are all alike again, but a pass is not over
    assert forecasts.chances(every, 8, 7) is None
    assert told[-1] == "sample forecasts: 0% of the samples are known, every sample is computed again"


def _noted(batches: list[Given], given: list[int]) -> list[Given]:
    for batch in batches:
        given += batch.indices.tolist()
    return batches


def test_the_log_says_how_much_was_left_out():
    trainer, told = make(), []
    trainer.listeners.append(lambda record: told.append(record.text) if isinstance(record, Notice) else None)
    train(trainer, 300)
    shares = [int(found[1]) for text in told if (found := re.search(r"data (\d+)% was foreseen", text))]
    assert 4 <= len(shares) == len(told) <= 8  # after 1, 2, 4, 8 and so on
    assert shares[0] < 30  # in the first pass little is known
    assert shares[-1] > 60


def test_a_loss_for_the_whole_batch_teaches_nothing_and_the_log_says_so_once():
    trainer, told = make(mean_loss), []
    trainer.listeners.append(lambda record: told.append(record.text) if isinstance(record, Notice) else None)
    results = train(trainer, 100)
    assert told.count(NO_SAMPLES) == 1
    plain = make(mean_loss, predict="off")
    assert [result.loss for result in train(plain, 100)] == [result.loss for result in results]


@pytest.mark.parametrize("predict", ["off", [], ["jumps"]])
def test_they_are_there_only_where_they_are_named(predict):
    assert not isinstance(make(predict=predict).loader(DATA, BATCH), ChosenLoader)


def test_micro_batches_are_told_apart():
    trainer = make(accumulate=2)
    loader = trainer.loader(DATA, BATCH)
    batches = iter(loader)
    for _ in range(8):
        trainer.step([next(batches), next(batches)])
    ledger = trainer._feed.samples._ledger
    assert ledger is not None
    assert ledger.computed == 8 * 2 * BATCH


def known(trainer: HybridTrainer) -> dict[int, float]:
    """What the ledger has of each sample."""
    losses = trainer._feed.samples.state()["ledger"]["losses"]
    return {index: float(loss) for index, loss in enumerate(losses) if not loss.isnan()}


def heard(trainer: HybridTrainer) -> list[str]:
    told: list[str] = []
    trainer.listeners.append(lambda record: told.append(record.text) if isinstance(record, Notice) else None)
    return told


def its_number(model: nn.Module, batch: Any) -> Tensor:
    """A loss that says which sample it is of."""
    inputs, numbers = batch
    losses: Tensor = numbers + 0 * model(inputs).sum()
    return losses


class Numbered(Numbers):
    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return self.inputs[index], torch.tensor(float(index))


def test_a_batch_from_elsewhere_teaches_nothing():
    trainer = make()
    loader = trainer.loader(DATA, BATCH)
    trainer.step((DATA.inputs[:BATCH], DATA.targets[:BATCH]))
    assert known(trainer) == {}
    trainer.step(next(iter(loader)))
    assert len(known(trainer)) == BATCH


def test_who_fetches_ahead_teaches_nothing_and_is_told_once():
    trainer = make(its_number)
    told, loader = heard(trainer), trainer.loader(Numbered(), BATCH)
    for _ in range(2):
        batches = iter(loader)
        following = next(batches)
        for batch in batches:
            trainer.step(following)
            following = batch
    assert known(trainer) == {}
    assert told.count(AHEAD) == 1
    list(islice(loader, 1))
    trainer.loader(Numbered(), BATCH)
    for batch in islice(iter(loader), 5):  # a loader that another has replaced
        trainer.step(batch)
    assert all(index == loss for index, loss in known(trainer).items())


def test_who_stops_and_begins_again_is_understood():
    trainer = make(its_number)
    loader = trainer.loader(Numbered(), BATCH)
    next(iter(loader))  # to look at
    for _ in range(3):
        for number, batch in enumerate(loader):
            trainer.step(batch)
            if number == 4:
                break
    assert len(known(trainer)) > 40
    assert all(index == loss for index, loss in known(trainer).items())


def test_losses_of_another_number_than_samples_teach_nothing_and_the_log_says_so_once():
    def tokens(model: nn.Module, batch: Any) -> Tensor:
        return each_loss(model, batch).repeat_interleave(3)

    trainer = make(tokens)
    told = heard(trainer)
    train(trainer, 20)
    assert known(trainer) == {}
    assert told.count(OTHER_LENGTH) == 1


def test_a_loader_that_is_made_again_goes_on_with_what_is_known():
    trainer = make()
    train(trainer, 40)
    before = known(trainer)
    trainer.loader(DATA, BATCH)
    assert known(trainer) == before
    with pytest.raises(ForeignCheckpointError):
        trainer.loader(DATA, BATCH // 2)
    assert known(trainer) == before


def test_a_refused_loader_leaves_a_loaded_run_as_it_was(tmp_path):
    whole = make()
    expected = train(whole, 90)
    half = make()
    train(half, 40)
    half.save(tmp_path / "half")
    trainer = make()
    trainer.load(tmp_path / "half")
    with pytest.raises(ForeignCheckpointError):
        trainer.loader(DATA, BATCH // 2)
    trainer.loader(DATA, BATCH)
    loader = trainer.loader(DATA, BATCH)
    assert [each.loss for each in train(trainer, 50, loader)] == [each.loss for each in expected[40:]]


@pytest.mark.parametrize("scale", [0.0, 1e-17])
def test_a_run_that_has_learned_everything_goes_on(scale):
    trainer = make(lambda model, batch: scale * each_loss(model, batch))
    assert len(train(trainer, 200)) == 200


def test_a_batch_of_another_size_than_was_given_teaches_nothing():
    trainer = make()
    batch = next(iter(trainer.loader(DATA, BATCH)))
    trainer.step(tuple(part[:3] for part in batch))
    assert trainer._feed.samples._ledger is not None
    assert trainer._feed.samples._ledger.computed == 0


def test_losses_of_a_step_that_failed_are_forgotten():
    fail = [False]

    def failing(model: nn.Module, batch: Any) -> Tensor:
        if fail[0]:
            raise RuntimeError("a cosmic ray")
        return each_loss(model, batch)

    trainer = make(failing)
    loader = trainer.loader(DATA, BATCH)
    fail[0] = True
    with pytest.raises(RuntimeError, match="cosmic"):
        trainer.step(next(iter(loader)))
    fail[0] = False
    plain = make()
    expected = train(plain, 120)
    assert [each.loss for each in train(trainer, 120, loader)] == [each.loss for each in expected]


@pytest.mark.parametrize(("at", "weighed"), [(1, False), (63, False), (64, False), (150, False), (150, True)])
@pytest.mark.parametrize("loader_first", [True, False])
def test_a_run_resumes_exactly(at: int, loader_first: bool, weighed: bool, tmp_path: Path):
    whole = make(sample_weights=weighed)
    expected = train(whole, 180)
    half = make(sample_weights=weighed)
    train(half, at)
    half.save(tmp_path / "half")
    trainer = make(sample_weights=weighed)
    if loader_first:
        loader = trainer.loader(DATA, BATCH)
        trainer.load(tmp_path / "half")
    else:
        trainer.load(tmp_path / "half")
        assert trainer.fingerprint() == half.fingerprint()
        loader = trainer.loader(DATA, BATCH)
    assert [each.loss for each in train(trainer, 180 - at, loader)] == [each.loss for each in expected[at:]]
    assert trainer.fingerprint() == whole.fingerprint()


def test_a_checkpoint_without_them_is_not_taken_for_one_with_them(tmp_path):
    plain = make(predict="off")
    train(plain, 5)
    plain.save(tmp_path / "plain")
    with pytest.raises(Exception, match="another"):
        make().load(tmp_path / "plain")


def test_nothing_is_heard_while_nobody_listens():
    model = nn.Linear(4, 1)
    loss = CheckedLoss(model, each_loss, "fp32")
    forecasts = SampleForecasts(loss, print)
    forecasts.expect(None, 1)
    loss.mean(next(iter([(DATA.inputs[:2], DATA.targets[:2])])))
    assert loss.heard is None
    forecasts.learn()
    assert forecasts.state() is None


def test_with_weights_the_reported_loss_is_that_of_all_samples():
    means = {}
    for weighed in (False, True):
        trainer = make(sample_weights=weighed)
        loader = trainer.loader(DATA, BATCH)
        train(trainer, 300, loader)
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        losses = [result.loss for result in train(trainer, 480, loader)]
        every = each_loss(trainer.model, (DATA.inputs, DATA.targets)).detach()
        means[weighed] = sum(losses) / len(losses) / float(every.mean())
    assert means[False] > 1.5  # what is hard comes more often
    assert means[True] == pytest.approx(1, abs=0.06)


@pytest.mark.filterwarnings("ignore:GPU memory ran out")
@pytest.mark.parametrize("fits", [3, 8])
def test_with_weights_a_step_of_micro_batches_and_parts_has_the_loss_of_the_weighed_samples(fits: int):
    def hungry(model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled() and len(batch[0]) > fits:
            raise torch.OutOfMemoryError("injected")
        return each_loss(model, batch)

    trainer = make(hungry, sample_weights=True, accumulate=2)
    loader, seen, found = trainer.loader(DATA, BATCH), [], []
    assert isinstance(loader, ChosenLoader)
    ask = loader.given
    loader.given = lambda: seen.append(ask()) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    batches = endless(loader, 2)
    for _ in range(120):
        batch = next(batches)
        losses = torch.cat([each_loss(trainer.model, each) for each in batch]).detach()
        loss = trainer.step(batch).loss
        weights = torch.cat([given.weights for given in seen[-1] if given.weights is not None])
        assert loss == pytest.approx(float((losses * weights).mean()), rel=1e-4)
        found.append(abs(loss / float(losses.mean()) - 1))
    assert max(found) > 0.2  # and that is not the mean of the losses


def test_weights_reach_no_probe_no_evaluation_and_no_forecast():
    trainer = make(its_number, sample_weights=True)
    train(trainer, 60, trainer.loader(Numbered(), BATCH))
    assert all(index == loss for index, loss in known(trainer).items())
    assert trainer._loss.weights is None
    trainer, plain = make(sample_weights=True), make(predict="off")
    train(trainer, 100)
    plain.model.load_state_dict(trainer.model.state_dict())
    batch = (DATA.inputs, DATA.targets)
    assert trainer.evaluate([batch]) == plain.evaluate([batch])


class Operations(TorchDispatchMode):
    """Counts what torch is asked for while it is open: on a GPU most of it is a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("predict", [["samples"], "auto"])
def test_between_two_choices_a_step_takes_three_operations_more(predict):
    def fewest(trainer: HybridTrainer) -> int:
        """Of the steps of a round, the first of which chooses the round after the next."""
        batches = endless(trainer.loader(DATA, BATCH), 1)
        for _ in range(80):
            trainer.step(next(batches))
        found: list[int] = []
        for _ in range(ROUND):
            with Operations() as operations:
                trainer.step(next(batches))
            found.append(operations.count)
        return min(found)

    assert fewest(make(predict=predict)) <= fewest(make(predict="off")) + 3


def test_where_nothing_is_left_out_weights_change_no_bit():
    weighed, plain = make(predict="auto", sample_weights=True), make(predict="off")
    assert [each.loss for each in train(weighed, COUNT // BATCH)] == [
        each.loss for each in train(plain, COUNT // BATCH)
    ]
    assert all(map(torch.equal, weighed.model.state_dict().values(), plain.model.state_dict().values()))


def test_weights_make_a_difference_and_a_checkpoint_without_them_is_not_taken_for_one_with_them(tmp_path):
    weighed, plain = make(sample_weights=True), make()
    assert [each.loss for each in train(weighed, 200)] != [each.loss for each in train(plain, 200)]
    plain.save(tmp_path / "plain")
    assert "weights" not in plain.state()["standing"]["data"]["position"]
    weighed.save(tmp_path / "weighed")
    other = make(sample_weights=True)
    other.load(tmp_path / "plain")
    with pytest.raises(ForeignCheckpointError, match="weighed"):
        other.loader(DATA, BATCH)
    other = make()
    other.loader(DATA, BATCH)
    with pytest.raises(ForeignCheckpointError, match="weighed"):
        other.load(tmp_path / "weighed")


def test_with_weights_a_step_that_failed_returns_to_the_same_weights():
    fail = [False]

    def failing(model: nn.Module, batch: Any) -> Tensor:
        losses = each_loss(model, batch)
        if fail[0]:
            raise RuntimeError("a cosmic ray")
        return losses

    trainer, plain = make(failing, sample_weights=True), make(sample_weights=True)
    loader = trainer.loader(DATA, BATCH)
    train(trainer, 120, loader)
    fail[0] = True
    with pytest.raises(RuntimeError, match="cosmic"):
        trainer.step(next(iter(loader)))
    fail[0] = False
    expected = train(plain, 180)
    assert [each.loss for each in train(trainer, 60, loader)] == [each.loss for each in expected[120:]]
    assert trainer.fingerprint() == plain.fingerprint()


def test_where_nothing_can_be_weighed_the_log_says_so_once():
    elsewhere = make(sample_weights=True)
    told = heard(elsewhere)
    for _ in range(3):
        elsewhere.step((DATA.inputs[:BATCH], DATA.targets[:BATCH]))
    assert told == [NO_LOADER]
    whole = make(mean_loss, sample_weights=True)
    told = heard(whole)
    plain = make(mean_loss, predict="off")
    assert [each.loss for each in train(whole, 40)] == [each.loss for each in train(plain, 40)]
    assert told.count(NO_SAMPLES + NOR_WEIGHTS) == 1


def test_weights_are_refused_where_no_sample_is_left_out():
    with pytest.raises(ModelError, match="sample_weights is not read"):
        make(predict=["jumps"], sample_weights=True)
