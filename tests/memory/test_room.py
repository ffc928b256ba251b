"""Whether host memory has room for a snapshot and the windows of jumps."""

from __future__ import annotations

import psutil
import pytest
import torch
from tests.memory.support import build, streamed
from torch import Tensor

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory.arena import RESERVE_BYTES
from hybridtrainer.memory.room import bytes_for_jumps, obstacle_to_jumps
from hybridtrainer.state import Training

JUMPS = HybridTrainerConfig(predict=["jumps"])


def streamed_training(mode: str = "split8") -> Training:
    model, optimizer = streamed(MemoryConfig.model_validate({"mode": mode}), model=build())
    return Training(model, optimizer, None, None)


def leave(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    memory = psutil.virtual_memory()._replace(available=free_bytes + RESERVE_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def test_a_model_that_is_not_streamed_has_no_obstacle(monkeypatch):
    model = build()
    leave(monkeypatch, 0)
    training = Training(model, torch.optim.AdamW(model.parameters()), None, None)
    assert obstacle_to_jumps(training, HybridTrainerConfig()) == ""


def test_jumps_of_a_streamed_model_must_be_asked_for():
    training = streamed_training()
    assert 'predict = ["jumps"]' in obstacle_to_jumps(training, HybridTrainerConfig(predict="auto"))
    assert obstacle_to_jumps(training, JUMPS) == ""


def test_the_limit_is_what_a_jump_needs(monkeypatch):
    training = streamed_training()
    needed = bytes_for_jumps(training, JUMPS.history_windows)
    leave(monkeypatch, needed)
    assert obstacle_to_jumps(training, JUMPS) == ""
    leave(monkeypatch, needed - 1)
    assert "iB are available" in obstacle_to_jumps(training, JUMPS)
    leave(monkeypatch, -RESERVE_BYTES)
    assert "and 0.0 GiB are available" in obstacle_to_jumps(training, JUMPS)


@pytest.mark.parametrize("mode", ["fp32", "split8"])
def test_it_counts_weights_states_and_windows(mode):
    training = streamed_training(mode)
    parameters = list(training.model.parameters())
    elements = sum(parameter.numel() for parameter in parameters)
    states = sum(
        value.nbytes for state in training.optimizer.state.values() for value in state.values()
        if isinstance(value, Tensor)
    )  # fmt: skip
    snapshot = elements * (4 if mode == "fp32" else 2) + states
    assert bytes_for_jumps(training, 0) == int(snapshot + 5.02 * elements)  # one is written beside those kept
    more = bytes_for_jumps(training, 10) - bytes_for_jumps(training, 0)
    assert 10 * elements < more < 10.3 * elements
    parameters[0].requires_grad_(False)  # nothing is forecast for it
    assert bytes_for_jumps(training, 0) == int(snapshot + 5.02 * (elements - parameters[0].numel()))
