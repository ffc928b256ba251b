"""Sample forecasts in a run: what they learn from, what they leave out, and that a run with them resumes exactly."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer import HybridTrainer, HybridTrainerConfig
from hybridtrainer.data.chosen import ChosenLoader
from hybridtrainer.losses import CheckedLoss
from hybridtrainer.predict.samples import NO_SAMPLES, SampleForecasts
from hybridtrainer.records import Notice

COUNT, BATCH = 256, 8


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


def _noted(batches: list[Tensor], given: list[int]) -> list[Tensor]:
    for indices in batches:
        given += indices.tolist()
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


@pytest.mark.parametrize("predict", ["off", "auto", [], ["jumps"]])
def test_they_are_there_only_where_they_are_named(predict):
    assert not isinstance(make(predict=predict).loader(DATA, BATCH), ChosenLoader)


def test_micro_batches_are_told_apart():
    trainer = make(accumulate=2)
    loader = trainer.loader(DATA, BATCH)
    batches = iter(loader)
    for _ in range(8):
        trainer.step([next(batches), next(batches)])
    ledger = trainer._samples._ledger
    assert ledger is not None
    assert ledger.computed == 8 * 2 * BATCH


def test_batches_from_elsewhere_teach_nothing():
    trainer = make()
    loader = trainer.loader(DATA, BATCH)
    trainer.step((DATA.inputs[:BATCH], DATA.targets[:BATCH]))
    batches = iter(loader)
    next(batches)
    trainer.step(next(batches))  # which of the two was it?
    ledger = trainer._samples._ledger
    assert ledger is not None
    assert ledger.computed == 0
    trainer.step(next(batches))
    assert ledger.computed == BATCH


def test_a_batch_of_another_size_than_was_given_teaches_nothing():
    trainer = make()
    batch = next(iter(trainer.loader(DATA, BATCH)))
    trainer.step(tuple(part[:3] for part in batch))
    assert trainer._samples._ledger is not None
    assert trainer._samples._ledger.computed == 0


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


@pytest.mark.parametrize("at", [1, 63, 64, 150])
@pytest.mark.parametrize("loader_first", [True, False])
def test_a_run_resumes_exactly(at: int, loader_first: bool, tmp_path: Path):
    whole = make()
    expected = train(whole, 180)
    half = make()
    train(half, at)
    half.save(tmp_path / "half")
    trainer = make()
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
