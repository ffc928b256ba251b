"""Each direction against a direct computation on an explicit trajectory."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.predict import directions
from hybridtrainer.weights import WeightGroup, Weights

TAUS = [
    torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64),
    torch.tensor([0.5, 2.0, 0.25, 1.0, 3.0], dtype=torch.float64),
    torch.tensor([1e-4, 2e-4], dtype=torch.float64),
    torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1, 0.1, 0.1, 0.7], dtype=torch.float64),
]
each_tau = pytest.mark.parametrize("tau", TAUS, ids=lambda tau: f"{len(tau)} windows")


def random_windows(tau: Tensor, size: int = 6) -> Tensor:
    return torch.randn(len(tau), size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def ends(windows: Tensor) -> Tensor:
    """Weights at the window ends, the first of them zero."""
    return torch.cat([torch.zeros(1, windows.shape[1], dtype=windows.dtype), windows.cumsum(0)])


def clock(tau: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=tau.dtype), tau.cumsum(0)])


def straight(tau: Tensor) -> tuple[Tensor, Tensor]:
    velocity = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    return tau[:, None] * velocity, velocity


@each_tau
def test_newest_is_the_last_windows_velocity(tau):
    windows = random_windows(tau)
    assert torch.allclose(directions.newest(tau) @ windows, windows[-1] / tau[-1])


@each_tau
def test_drift_is_the_way_from_start_to_end_over_the_time(tau):
    windows = random_windows(tau)
    assert torch.allclose(directions.drift(tau) @ windows, windows.sum(0) / tau.sum())


@each_tau
@pytest.mark.parametrize("decay", [0.8, 0.1])
def test_decayed_drift_counts_older_windows_less(tau, decay):
    windows = random_windows(tau)
    moved, time = torch.zeros(6, dtype=torch.float64), 0.0
    for window, t in zip(windows, tau.tolist(), strict=True):
        moved, time = moved * decay + window, time * decay + t
    assert torch.allclose(directions.drift(tau, decay) @ windows, moved / time)


@each_tau
def test_slope_is_the_least_squares_line_through_the_window_ends(tau):
    windows = random_windows(tau)
    expected = numpy.polyfit(clock(tau).numpy(), ends(windows).numpy(), 1)[0]
    assert numpy.allclose((directions.slope(tau) @ windows).numpy(), expected)


@each_tau
def test_acceleration_is_the_change_of_velocity_between_the_halves(tau):
    windows = random_windows(tau)
    half = len(tau) // 2
    older = windows[:half].sum(0) / tau[:half].sum()
    newer = windows[half:].sum(0) / tau[half:].sum()
    middle = (tau[half:].sum() + tau[:half].sum()) / 2  # between the middles of the halves
    assert torch.allclose(directions.acceleration(tau) @ windows, (newer - older) / middle)


@each_tau
def test_acceleration_of_a_parabola_is_exact(tau):
    bend = torch.tensor([2.0, -1.0], dtype=torch.float64)
    places = clock(tau)[:, None] ** 2 / 2 * bend + clock(tau)[:, None] * 3
    assert torch.allclose(directions.acceleration(tau) @ places.diff(dim=0), bend)


@each_tau
def test_a_straight_line_has_one_velocity_and_no_acceleration(tau):
    windows, velocity = straight(tau)
    for found in (directions.newest(tau), directions.drift(tau), directions.drift(tau, 0.5), directions.slope(tau)):
        assert torch.allclose(found @ windows, velocity)
    assert torch.allclose(directions.acceleration(tau) @ windows * tau.sum(), torch.zeros(3, dtype=torch.float64))


@each_tau
def test_denoise_leads_to_the_mean_of_the_window_ends(tau):
    windows = random_windows(tau)
    places = ends(windows)
    assert torch.allclose(places[-1] + directions.denoise(tau) @ windows, places.mean(0))


OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}
MOMENTLESS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "plain rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)).to(dtype)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def trained(name: str, model: nn.Module, steps: int = 4) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = (OPTIMIZERS | MOMENTLESS)[name](model.parameters())
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(8, 2, 4, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def weights_of(model: nn.Sequential, bucket_elements: int = 50) -> Weights:
    conv, linear = model[0], model[2]
    groups = [WeightGroup("conv", 0, tuple(conv.parameters())), WeightGroup("head", 0, tuple(linear.parameters()))]
    return Weights(groups, bucket_elements)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_momentum_are_recognized_once_they_have_stepped(name):
    model = net()
    assert not directions.has_moments(trained(name, model, steps=0))
    assert directions.has_moments(trained(name, model))


@pytest.mark.parametrize("name", MOMENTLESS)
def test_optimizers_without_momentum_are_recognized(name):
    assert not directions.has_moments(trained(name, net()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_momentum_moves_each_weight_along_its_own_moment(name, dtype):
    model = net(dtype)
    optimizer = trained(name, model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = fingerprint_of(optimizer)
    directions.momentum_displace_(weights_of(model), optimizer, torch.tensor([0.5, 0.25], dtype=torch.float64))
    eps = optimizer.param_groups[0].get("eps", 1e-8)
    wide = torch.promote_types(dtype, torch.float32)
    for index, (parameter, old) in enumerate(zip(model.parameters(), before, strict=True)):
        held = optimizer.state[parameter]
        if "momentum_buffer" in held:
            step = -held["momentum_buffer"].to(wide)
        elif "exp_inf" in held:
            step = -held["exp_avg"].to(wide) / (held["exp_inf"].to(wide) + eps)
        else:
            step = -held["exp_avg"].to(wide) / (held["exp_avg_sq"].to(wide).sqrt() + eps)
        expected = (old.to(wide) + (0.5 if index < 2 else 0.25) * step).to(dtype)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(parameter.detach(), expected, rtol=tolerance, atol=tolerance)
        assert not torch.equal(parameter.detach(), old)
    assert fingerprint_of(optimizer) == state


def fingerprint_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(value.double().sum()) for held in optimizer.state.values() for value in held.values()]


def test_no_time_moves_nothing_not_even_the_last_bit():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = net(dtype)
        optimizer = trained("adam", model)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        directions.momentum_displace_(weights_of(model), optimizer, torch.zeros(2, dtype=torch.float64))
        assert all(torch.equal(p.detach(), old) for p, old in zip(model.parameters(), before, strict=True)), dtype


def test_momentum_follows_the_next_step_of_sgd_without_a_gradient():
    model = net()
    optimizer = trained("momentum", model)
    by_hand = [p.detach() - 0.1 * 0.9 * optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    directions.momentum_displace_(weights_of(model), optimizer, torch.full((2,), 0.1 * 0.9, dtype=torch.float64))
    for parameter, expected in zip(model.parameters(), by_hand, strict=True):
        assert torch.allclose(parameter.detach(), expected, atol=1e-7)


def test_a_weight_without_a_moment_stays():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    conv, head = model.get_parameter("0.weight"), model.get_parameter("2.weight")
    head.square().sum().backward()
    optimizer.step()
    before = conv.detach().clone(), head.detach().clone()
    directions.momentum_displace_(weights_of(model), optimizer, torch.ones(2, dtype=torch.float64))
    assert torch.equal(conv.detach(), before[0])
    assert not torch.equal(head.detach(), before[1])
