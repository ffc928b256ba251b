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


def test_a_resident_model_makes_jumps_where_there_is_room(monkeypatch):
    model = build()
    training = Training(model, torch.optim.AdamW(model.parameters()), None, None)
    elements = sum(parameter.numel() for parameter in model.parameters())
    needed = bytes_for_jumps(training, JUMPS.history_windows)
    assert needed == 12 * elements + int(elements * (4 + 1.02 * (JUMPS.history_windows + 1)))  # moments not made yet
    for config in (JUMPS, HybridTrainerConfig()):
        leave(monkeypatch, needed)
        assert obstacle_to_jumps(training, config) == ""
        leave(monkeypatch, needed - 1)
        assert "for a snapshot and the windows" in obstacle_to_jumps(training, config)
    assert obstacle_to_jumps(training, HybridTrainerConfig(predict="off")) == ""


def test_moments_are_counted_before_they_are_made():
    model = build()
    plain, heavy = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum) for momentum in (0.0, 0.9))
    more = bytes_for_jumps(Training(model, heavy, None, None), 8) - bytes_for_jumps(
        Training(model, plain, None, None), 8
    )
    assert more == sum(parameter.nbytes for parameter in model.parameters())


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
