"""The averaged read-out: a plain mean first, then an exponential one; swapped in and out without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import EAGER, SETUPS, cnn_setup, gpt_setup
from torch import Tensor, nn

from hybridtrainer.predict.readout import AveragedReadout
from hybridtrainer.records import Phase
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
    trainer._roll_back("because the test says so")
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


def test_every_copy_of_all_weights_is_counted():
    readout = AveragedReadout(One(), decay=0.75)
    with readout.in_place():
        assert readout.copies == 0
    readout.observe()
    readout.observe()
    assert readout.copies == 1
    with readout.in_place():
        assert readout.copies == 2


def test_frozen_weights_are_not_averaged():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    readout = AveragedReadout(model, 0.9)
    readout.observe()
    assert [tuple(tensor.shape) for tensor in readout.state()["average"]] == [(1, 2), (1,)]
    frozen = model[0].weight
    with readout.in_place():
        assert model[0].weight is frozen
