"""The average of a streamed model: in host memory, of every few steps, swapped in and out without a trace."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch
from tests.support import gpt_setup, tiny_gpt

from hybridtrainer import HybridTrainer, HybridTrainerConfig, MemoryConfig, stream
from hybridtrainer.errors import MemoryBudgetError
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.predict import host_average
from hybridtrainer.predict.averages import averages_here
from hybridtrainer.predict.host_average import HostAverage
from hybridtrainer.predict.readout import make_readout

SETUP = gpt_setup(dropout=0.0)


def make(mode: Any = "split8", clipping: Any = "fused", **settings: Any) -> HybridTrainer:
    torch.manual_seed(0)
    model = stream(tiny_gpt(0.0), MemoryConfig(mode=mode, clipping=clipping, max_gpu_blocks=2), "cpu", lr=1e-3)
    options: dict[str, Any] = {"predict": "off", "readout": "averaged", "readout_decay": 0.9, **settings}
    return HybridTrainer(model, None, gpt_loss, HybridTrainerConfig(**options))


def train(trainer: HybridTrainer, first: int, last: int) -> list[float]:
    return [trainer.step(batch).loss for batch in SETUP.batches[first:last]]


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(host_average, "EVERY", 4)


@pytest.mark.parametrize(("mode", "clipping"), [("fp32", "exact"), ("split8", "fused"), ("sr8", "exact")])
def test_training_with_it_is_training_without_it_and_what_is_read_out_is_the_average(mode, clipping):
    averaged, last = make(mode, clipping), make(mode, clipping, readout="last", readout_decay=0.99)
    names = [name for name, _ in last.model.named_parameters()]
    expected = {name: torch.zeros(()) for name in names}
    for step in range(14):
        assert train(averaged, step, step + 1) == train(last, step, step + 1)
        if step % 4 == 0:
            share = max(1 - 0.9**4, 1 / (step // 4 + 1))
            for name, parameter in last.model.named_parameters():
                values = parameter.home.read(0, parameter.numel())  # type: ignore[attr-defined]
                expected[name] = expected[name] + (values - expected[name]) * share
        if step == 9:  # in the middle, and the run goes on as if nobody had looked
            averaged.evaluate(SETUP.probes)
    before = averaged.fingerprint()
    with averaged.read_out():
        for name, parameter in averaged.model.named_parameters():
            close = 1e-6 if mode == "fp32" else 1e-2
            torch.testing.assert_close(parameter.detach().float().view(-1), expected[name], rtol=close, atol=close)
    assert averaged.fingerprint() == before
    assert averaged.evaluate(SETUP.probes) != last.evaluate(SETUP.probes)


def test_an_error_while_it_is_read_out_leaves_no_trace():
    trainer = make()
    train(trainer, 0, 6)
    before = trainer.fingerprint()
    with pytest.raises(KeyError), trainer.read_out():
        raise KeyError
    assert trainer.fingerprint() == before


def test_before_the_first_step_there_is_nothing_to_swap():
    trainer = make()
    before = trainer.fingerprint()
    with trainer.read_out():
        assert trainer.fingerprint() == before


def test_a_run_resumes_exactly(tmp_path):
    whole = make()
    train(whole, 0, 20)
    half = make()
    train(half, 0, 7)
    half.save(tmp_path / "half")
    other = make()
    other.load(tmp_path / "half")
    train(other, 7, 20)
    assert other.fingerprint() == whole.fingerprint()
    assert other.evaluate(SETUP.probes) == whole.evaluate(SETUP.probes)


def test_where_host_memory_has_no_room_it_is_said_before_anything_is_trained(monkeypatch):
    training = make(readout="last", readout_decay=0.99)._training
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=1000))
    config = HybridTrainerConfig(readout="averaged")
    with pytest.raises(MemoryBudgetError, match="averaged read-out"):
        make_readout(training, config, None, print)
    needed = averages_here(training, config, has_probes=False).host_bytes
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=needed))
    assert isinstance(make_readout(training, config, None, print), HostAverage)


def test_copies_of_all_weights_are_counted():
    trainer = make()
    train(trainer, 0, 5)
    assert trainer.readout.copies == 2
    trainer.evaluate(SETUP.probes)
    assert trainer.readout.copies == 3
