"""The exact values of a streamed parameter, read and displaced in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.memory.support import batches, build, streamed, train
from torch import nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory.home import StreamedHome


class _Engine:
    def __init__(self) -> None:
        self.settled = 0

    def settle(self) -> None:
        self.settled += 1


def home_of(kind: Any, values: torch.Tensor) -> tuple[StreamedHome, nn.Parameter, torch.Tensor | None, _Engine]:
    from hybridtrainer.kernels.reference import write_

    parameter = nn.Parameter(torch.zeros(values.shape, dtype=torch.float32 if kind == "fp32" else torch.bfloat16))
    low = torch.zeros(values.numel(), dtype=torch.int16) if kind.startswith("split") else None
    write_(kind, parameter.detach().view(-1), {} if low is None else {"low": low}, values.view(-1))
    engine: Any = _Engine()
    return StreamedHome(parameter, kind, low, engine), parameter, low, engine


VALUES = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["fp32", "split32", "split8"])
def test_values_of_32_bits_are_read_exactly(kind):
    home, *_ = home_of(kind, VALUES)
    assert torch.equal(home.read(3, 11), VALUES.view(-1)[3:11])


@pytest.mark.parametrize("kind", ["sr8", "factored"])
def test_values_of_16_bits_are_read_as_they_are(kind):
    home, *_ = home_of(kind, VALUES)
    assert torch.equal(home.read(0, 20), VALUES.view(-1).bfloat16().float())


@pytest.mark.parametrize("kind", ["fp32", "split32"])
def test_a_displacement_smaller_than_bf16_shows_is_kept_and_touches_its_range_only(kind):
    home, _, _, _ = home_of(kind, VALUES)
    step = torch.full((5,), 1e-6)
    home.add_(7, step)
    expected = VALUES.view(-1).clone()
    expected[7:12] += step
    assert torch.equal(home.read(0, 20), expected)
    assert not torch.equal(expected, VALUES.view(-1))


@pytest.mark.parametrize("kind", ["fp32", "split32"])
def test_values_that_are_written_are_kept_exactly(kind):
    home, *_, engine = home_of(kind, VALUES)
    home.write_(VALUES.view(-1) + 1e-6)
    assert engine.settled == 1
    assert torch.equal(home.read(0, 20), VALUES.view(-1) + 1e-6)


def test_what_is_on_its_way_is_waited_for_first():
    home, *_, engine = home_of("fp32", VALUES)
    home.read(0, 1)
    assert engine.settled == 1
    home.add_(0, torch.ones(1))
    assert engine.settled == 2


def test_others_are_told_that_a_parameter_was_written():
    home, parameter, low, _ = home_of("split32", VALUES)
    assert low is not None
    before = parameter._version, low._version
    home.add_(0, torch.ones(20))
    assert parameter._version > before[0]
    assert low._version > before[1]


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_displacement_of_every_parameter_is_seen_by_the_next_step(clipping):
    model, optimizer = streamed(MemoryConfig(mode="split8", clipping=clipping), model=build())
    train(model, optimizer, batches(2))
    before = {name: _home(parameter).read(0, parameter.numel()) for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        _home(parameter).add_(0, torch.full((parameter.numel(),), 0.5))
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, batches(1))
    for name, parameter in model.named_parameters():
        found = _home(parameter).read(0, parameter.numel())
        torch.testing.assert_close(found, before[name] + 0.5, rtol=0, atol=1e-6)


def _home(parameter: nn.Parameter) -> StreamedHome:
    home = parameter.home  # type: ignore[attr-defined]
    assert isinstance(home, StreamedHome)
    return home
