"""The averaged read-out: a plain mean first, then an exponential one; swapped in and out without a trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import EAGER, SETUPS, cnn_setup, gpt_setup
from torch import Tensor, nn

from hybridtrainer import HybridTrainerConfig, MemoryConfig, stream
from hybridtrainer.models.gpt import build_gpt
from hybridtrainer.predict.host_average import HostAverage
from hybridtrainer.predict.readout import AveragedReadout, ChosenReadout, LastReadout, make_readout
from hybridtrainer.records import Phase
from hybridtrainer.state import Training
from hybridtrainer.trainer import HybridTrainer


class One(nn.Module):
    """One weight, one statistic, one counter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def set(self, value: float) -> None:
        for tensor in self.state_dict().values():
            tensor.fill_(value)


def training(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Training:
    return Training(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), None, None)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_it_is_a_plain_mean_at_first_and_then_forgets():
    model = One()
    readout = AveragedReadout(model, decay=0.75)
    expected = 0.0
    for step, value in enumerate([1.0, 2.0, 6.0, 4.0, 10.0, -3.0]):
        model.set(value)
        readout.observe()
        expected += (value - expected) * max(0.25, 1 / (step + 1))
        with readout.in_place():
            assert model.weight.tolist() == pytest.approx([expected] * 2)
            assert model.get_buffer("mean").tolist() == pytest.approx([expected])
            assert model.get_buffer("count").item() == int(value)  # a count has no average


def test_the_first_mean_is_exact():
    model = One()
    readout = AveragedReadout(model, decay=0.99)
    for value in (1.0, 2.0, 6.0):
        model.set(value)
        readout.observe()
    with readout.in_place():
        assert model.weight.tolist() == pytest.approx([3.0, 3.0])


def test_the_swap_leaves_no_trace_even_where_it_is_left_by_an_error():
    model = cnn_setup().model
    readout = AveragedReadout(model, 0.9)
    readout.observe()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    before = weights(model)
    with pytest.raises(ValueError, match="in between"), readout.in_place():
        assert not torch.equal(next(model.parameters()), next(iter(before.values())))
        raise ValueError("in between")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_before_the_first_step_there_is_nothing_to_swap():
    model = One()
    with AveragedReadout(model, 0.9).in_place():
        assert model.weight.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_training_with_it_is_training_without_it(kind):
    finals = []
    for readout in ("last", "averaged"):
        torch.manual_seed(3)
        setup = SETUPS[kind]()
        trainer = setup.trainer(settings=EAGER | {"readout": readout})
        for batch in setup.batches[:60]:
            trainer.step(batch)
        finals.append((weights(setup.model), trainer.step_count, trainer.evaluate(setup.probes)))
    (plain, clock, loss), (averaged, other_clock, other_loss) = finals
    assert clock == other_clock and all(torch.equal(plain[name], averaged[name]) for name in plain)
    assert loss != other_loss


def averaging() -> tuple[HybridTrainer, list[Any]]:
    setup = gpt_setup()
    return setup.trainer(settings=EAGER | {"readout": "averaged"}), setup.batches


@pytest.mark.parametrize("phase", list(Phase))
def test_it_goes_on_from_a_checkpoint_of_any_phase(phase, tmp_path):
    ours, batches = averaging()
    torch.manual_seed(1)
    rest = iter(batches)
    while ours.current_phase is not phase or not ours.step_count:
        ours.step(next(rest))
    ours.save(tmp_path / "checkpoint")
    left = list(rest)[:20]
    for batch in left:
        ours.step(batch)
    theirs, _ = averaging()
    theirs.load(tmp_path / "checkpoint")
    for batch in left:
        theirs.step(batch)
    assert theirs.fingerprint() == ours.fingerprint()
    probes = gpt_setup().probes
    assert theirs.evaluate(probes) == ours.evaluate(probes)


def test_a_roll_back_takes_the_average_back_too(monkeypatch):
    trainer, batches = averaging()
    rest = iter(batches)
    while trainer.current_phase is not Phase.CORRECT:
        before = trainer.fingerprint()["readout"]
        trainer.step(next(rest))
    jump = trainer.step_count
    assert trainer.fingerprint()["readout"] == before
    trainer.step(next(rest))
    assert trainer.fingerprint()["readout"] != before
    assert trainer._at.jump is not None
    trainer._roll_back(trainer._at.jump, "because the test says so")
    assert trainer.step_count < jump and trainer.fingerprint()["readout"] == before


def test_read_out_gives_the_model_the_averaged_weights():
    trainer, batches = averaging()
    for batch in batches[:20]:
        trainer.step(batch)
    own, probes = weights(trainer.model), batches[20:22]
    with trainer.read_out():
        assert not torch.equal(next(trainer.model.parameters()), next(iter(own.values())))
    assert all(torch.equal(tensor, own[name]) for name, tensor in trainer.model.state_dict().items())
    plain = gpt_setup().trainer()
    with trainer.read_out():
        plain.model.load_state_dict(trainer.model.state_dict())
    assert trainer.evaluate(probes) == pytest.approx(plain.evaluate(probes), rel=1e-6)


def test_what_is_open_is_not_swapped_again():
    readout = AveragedReadout(model := One(), decay=0.75)
    for value in (0.0, 2.0):
        model.set(value)
        readout.observe()
    with readout.in_place():
        copies = readout.copies
        with readout.in_place():
            assert readout.copies == copies
        assert model.weight.tolist() == [1.0, 1.0]
    assert model.weight.tolist() == [2.0, 2.0]


def test_every_copy_of_all_weights_is_counted():
    readout = AveragedReadout(One(), decay=0.75)
    with readout.in_place():
        assert readout.copies == 0
    readout.observe()
    readout.observe()
    assert readout.copies == 1
    with readout.in_place():
        assert readout.copies == 2


class Counting(nn.Module):
    """A weight that goes up by one at a time, and whose loss is its squared distance from a goal."""

    def __init__(self, goal: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.goal = goal

    def loss(self) -> float:
        return (float(self.weight.detach()) - self.goal) ** 2

    def losses(self) -> list[list[float]]:
        return [[self.loss()]]


def chosen(goal: float, steps: int = 100) -> tuple[Counting, ChosenReadout, list[str]]:
    model = Counting(goal)
    told: list[str] = []
    readout = ChosenReadout(model, model.losses, told.append)
    for step in range(steps):
        model.weight.data.fill_(step)
        readout.observe()
    return model, readout, told


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        (99.0, ""),
        (61.0, "carried on to the present"),  # the averages are at 57.4 and 48
        (57.402, "about 50 steps"),
        (55.0, "about 75 steps"),
        (48.0, "about 250 steps"),
    ],
)
def test_the_place_with_the_lowest_loss_is_read_out(goal, expected):
    model, readout, told = chosen(goal)
    with readout.in_place():
        assert float(model.weight.detach()) == pytest.approx(goal, abs=0.1)
    assert float(model.weight.detach()) == 99
    assert told == [] if goal == 99.0 else expected in told[0]  # the last weights are what it was before
    with readout.in_place():
        pass
    assert len(told) <= 1  # it is said when it changes


def test_who_asks_again_after_a_step_is_told_the_same_and_what_is_open_is_not_chosen_again():
    model, readout, told = chosen(61.0)
    measured: list[float] = []

    def probe() -> list[list[float]]:
        measured.append(float(model.weight.detach()))
        return model.losses()

    readout._probe = probe
    for times in (1, 2, 3):
        with readout.in_place():
            assert float(model.weight.detach()) == pytest.approx(61.0, abs=0.1)
            with readout.in_place():
                assert float(model.weight.detach()) == pytest.approx(61.0, abs=0.1)
        assert len(measured) == 5 * times  # the last weights, three places on the line, and where it is lowest
    assert len(told) == 1
    assert readout.choosing_seconds > 0


def test_along_the_line_it_goes_half_of_the_way_at_each_step():
    model, readout, _ = chosen(57.402)
    readout.choose()
    model.goal = 48.0
    readout._probe = lambda: [[model.loss() + 1e4 * sign for sign in (-model.loss(), model.loss())]]  # nothing is sure
    readout._steps += 1  # as if a step had been made without a change
    for _ in range(2):
        with readout.in_place():
            assert float(model.weight.detach()) == pytest.approx((57.402 + 48.0) / 2, abs=0.01)


def test_where_the_parabola_is_wrong_what_was_measured_to_be_better_is_read_out():
    """Beyond the short average the loss rises steeply: the parabola's lowest place is far from the lowest loss."""
    model, readout, _ = chosen(57.402)
    steep = {48.0: 0.165, 57.402: 0.061, 62.103: 0.908, 99.0: 9.0}
    places = sorted(steep)

    def losses() -> list[list[float]]:
        here = float(model.weight.detach())
        near = min(places, key=lambda place: abs(place - here))
        return [[steep[near] if abs(near - here) < 0.01 else 0.092]]

    readout._probe = losses
    with readout.in_place():
        assert float(model.weight.detach()) == pytest.approx(57.402, abs=0.01)


@pytest.mark.parametrize("bad", [48.0, 62.103])
def test_a_place_without_a_loss_does_not_cost_the_averages(bad):
    model, readout, _ = chosen(57.402)
    readout.choose()
    readout._steps += 1

    def losses() -> list[list[float]]:
        here = float(model.weight.detach())
        return [[float("nan") if abs(here - bad) < 0.01 else model.loss()]]

    readout._probe = losses
    with readout.in_place():
        assert float(model.weight.detach()) == pytest.approx(57.402, abs=3)


def test_an_error_while_averages_are_written_leaves_the_own_weights(monkeypatch):
    model, readout, _ = chosen(57.402)
    monkeypatch.setattr(AveragedReadout, "_write", lambda self, live, *_: (live[0].zero_(), 1 / 0))
    with pytest.raises(ZeroDivisionError), readout.in_place():
        pass
    assert float(model.weight.detach()) == 99


@pytest.mark.parametrize(
    "buffer",
    [
        torch.ones(1).expand(5),
        torch.full((3,), -torch.inf),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(3).to_sparse(),
    ],
    ids=["expanded", "infinite", "fp8", "sparse"],
)
def test_buffers_without_a_mean_stay_as_they_are(buffer):
    model = nn.Linear(2, 1)
    model.register_buffer("odd", buffer)
    readout = AveragedReadout(model, 0.5)
    readout.observe()
    readout.observe()
    with readout.in_place():
        assert model.odd is buffer
    assert len(readout.state()["average"]) == 2


def test_a_buffer_that_is_replaced_by_a_longer_one_begins_anew():
    model = nn.Linear(2, 1)
    model.register_buffer("cache", torch.zeros(2))
    readout = AveragedReadout(model, 0.5)
    readout.observe()
    model.cache = torch.ones(4)
    with readout.in_place():
        assert model.cache.tolist() == [1.0] * 4
    readout.observe()
    model.cache.fill_(2.0)
    readout.observe()
    with readout.in_place():
        assert model.cache.tolist() == [1.5] * 4


def test_it_returns_to_the_last_weights_where_they_are_likely_better():
    model, readout, told = chosen(62.0)
    readout.choose()
    model.goal = 99.0
    readout._steps += 1
    with readout.in_place():
        assert float(model.weight.detach()) == 99
    assert "the last weights, held-out loss 0 instead of" in told[1]


def test_statistics_are_not_carried_on_beyond_the_averages():
    """A variance that falls would be negative there."""
    short, long = AveragedReadout(model := One(), 0.5), AveragedReadout(model, 0.99)
    for value in (9.0, 9.0, 1.0, 0.0, 0.0, 0.0):
        model.set(value)
        short.observe()
        long.observe()
    mean = short.state()["average"][1].item()
    with short.in_place(long, 0.5):
        assert model.weight[0].item() < 0
        assert model.get_buffer("mean").item() == mean > 0
    with short.in_place(long, -1.0):
        assert model.get_buffer("mean").item() == pytest.approx(19 / 6)


def test_what_may_be_chance_changes_no_choice():
    """The average lies 37 steps back; the spread of what the samples say of it decides."""
    for spread, expected in ((30000.0, 99.0), (1.0, 62.0)):
        model, _, _ = chosen(62.0)
        signs = torch.tensor([1.0, -1.0]).repeat(8)

        def losses(model: Counting = model, spread: float = spread, signs: Tensor = signs) -> list[list[float]]:
            here = float(model.weight.detach())
            return [((here - 62.0) ** 2 + spread * signs * here / 99).tolist()]

        readout = ChosenReadout(model, losses, print)
        for step in range(100):
            model.weight.data.fill_(step)
            readout.observe()
        with readout.in_place():
            assert float(model.weight.detach()) == pytest.approx(expected, abs=1)


def test_losses_that_are_no_numbers_choose_nothing():
    model, readout, _ = chosen(45.0)
    model.goal = float("nan")
    with readout.in_place():
        assert float(model.weight) == 99


def test_before_it_has_observed_anything_nothing_is_measured():
    model = Counting(1.0)
    readout = ChosenReadout(model, lambda: pytest.fail("measured"), print)
    with readout.in_place():
        assert float(model.weight) == 0


def test_what_was_chosen_and_averaged_comes_back():
    model, readout, told = chosen(45.0)
    with readout.in_place():
        expected = float(model.weight)
    other = ChosenReadout(model, model.losses, told.append)
    other.restore(readout.state())
    with other.in_place():
        assert float(model.weight) == expected
    assert len(told) == 1


def test_a_choice_that_comes_back_is_not_moved_further_along_the_line():
    model, readout, _ = chosen(57.402)
    readout.choose()
    readout._steps += 1
    model.goal = 50.0
    readout.choose()
    other = ChosenReadout(model, model.losses, print)
    other.restore(readout.state())
    other.choose()
    assert other.state() == readout.state()


def test_each_average_takes_in_weights_in_strides_and_a_resumed_one_keeps_step():
    model, readout, _ = chosen(45.0, steps=50)
    assert [each["observed"] for each in readout.state()["averages"]] == [13, 4]
    other = ChosenReadout(model, model.losses, print)
    other.restore(readout.state())
    for step in range(50, 101):
        model.weight.data.fill_(step)
        readout.observe()
        other.observe()
    assert [each["observed"] for each in readout.state()["averages"]] == [26, 7]
    assert [each["average"] for each in other.state()["averages"]] == [
        each["average"] for each in readout.state()["averages"]
    ]


def test_a_window_of_50_steps_is_one_of_50_steps_whatever_the_stride():
    model, readout, _ = chosen(0.0, steps=401)
    for number, window in enumerate((50, 250)):
        every = AveragedReadout(model, 1 - 1 / window)
        for step in range(401):
            model.weight.data.fill_(step)
            every.observe()
        expected = every.state()["average"][0].item()
        assert readout.state()["averages"][number]["average"][0].item() == pytest.approx(expected, abs=8)


@pytest.mark.parametrize(
    ("settings", "probes", "kind"),
    [
        ({"predict": "auto"}, True, ChosenReadout),
        ({"predict": "auto"}, False, LastReadout),
        ({"predict": "auto", "readout": "last"}, True, LastReadout),
        ({"predict": "auto", "readout": "averaged"}, True, AveragedReadout),
        ({"predict": "off"}, True, LastReadout),
        ({"predict": ["jumps"]}, True, LastReadout),
    ],
)
def test_it_is_chosen_where_predict_is_auto_and_something_is_held_out(settings, probes, kind):
    config = HybridTrainerConfig(**settings)
    assert type(make_readout(training(One()), config, (lambda: [[0.0]]) if probes else None, print)) is kind


def test_a_streamed_model_has_its_average_in_host_memory_and_no_choice():
    model = stream(build_gpt("nano"), MemoryConfig(mode="split8"), "cpu", lr=1e-3)
    own: Any = model.optimizer
    assert isinstance(make_readout(training(model, own), HybridTrainerConfig(), lambda: [[0.0]], print), LastReadout)
    averaged = HybridTrainerConfig(readout="averaged")
    assert isinstance(make_readout(training(model, own), averaged, None, print), HostAverage)


@pytest.mark.parametrize("falls", [False, True])
def test_with_auto_averages_are_made_whether_or_not_the_rate_falls(falls):
    setup = gpt_setup()
    trainer = setup.trainer(settings={**EAGER, "predict": "auto", "depth": {"until": 0.01}})
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 0.1 ** (step / 40) if falls else 1.0)
    trainer._training = replace(trainer._training, scheduler=scheduler)
    trainer.expect_end(40)
    for batch in setup.batches[:30]:
        trainer.step(batch)
    readout: Any = trainer.readout
    assert readout._averages[0].has_observed
    own = trainer._loss_on(setup.probes)
    assert trainer.evaluate(setup.probes) <= own


def test_frozen_weights_are_not_averaged():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    readout = AveragedReadout(model, 0.9)
    readout.observe()
    assert [tuple(tensor.shape) for tensor in readout.state()["average"]] == [(1, 2), (1,)]
    frozen = model[0].weight
    with readout.in_place():
        assert model[0].weight is frozen
