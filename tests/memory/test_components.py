"""Weights, states and gradients: counted as they are, each once."""

from __future__ import annotations

import torch
from torch import nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory.components import Components, components, device_of, gradient_bytes
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import build_gpt

CPU = torch.device("cpu")


def trained(model: nn.Module, *inputs: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(*inputs).float().square().mean().backward()
    optimizer.step()
    return optimizer


def test_a_trained_model_has_weights_two_moments_and_gradients():
    model = nn.Linear(7, 5)
    optimizer = trained(model, torch.ones(2, 7))
    weights = 4 * (7 * 5 + 5)
    counters = 2 * 4  # AdamW keeps a step for each parameter
    assert components(model, optimizer, CPU) == Components(weights, 2 * weights + counters, weights)
    optimizer.zero_grad()
    assert components(model, optimizer, CPU).gradients == 0


def test_tied_weights_count_once_and_buffers_count():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.append(nn.Linear(3, 3))
    model[2].weight = model[0].weight
    assert components(model, None, CPU).weights == 4 * (9 + 3 + 3) + 4 * (3 + 3) + (4 * 3 + 4 * 3 + 8)


def test_what_is_elsewhere_does_not_count():
    model = nn.Linear(3, 3)
    model.bias = nn.Parameter(torch.empty(3, device="meta"))
    assert components(model, None, CPU).weights == 36
    assert gradient_bytes(model.parameters(), torch.device("meta")) == 0


def test_a_streamed_model_has_the_places_through_which_its_blocks_pass():
    model = build_gpt("nano", device="meta")
    stream(model, MemoryConfig(mode="split8", clipping="exact", max_gpu_blocks=2), device="cpu")
    optimizer = model.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    rings = optimizer.engine.rings  # type: ignore[attr-defined]
    own = sum(parameter.nbytes for parameter in model.parameters())
    kept = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    small = sum(slot.buffer.nbytes for slot in rings.states.pinned.values())
    assert components(model, optimizer, CPU) == Components(
        own + 2 * rings.weights.slot_bytes, kept + 2 * rings.states.slot_bytes + small, 2 * rings.gradients.slot_bytes
    )
    assert device_of(model, optimizer) == CPU


def test_a_model_without_parameters_is_on_the_cpu():
    assert device_of(nn.ReLU()) == CPU
