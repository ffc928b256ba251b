"""Forecasters: right on straight lines, unsure of noise, and never beyond their trust radius."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from hybridtrainer.predict import directions
from hybridtrainer.predict.baselines import AVERAGING, MIN_WINDOWS, VELOCITIES, Forecast, Past, forecast, stack_past
from hybridtrainer.schedule import look_ahead

NAMES = list(VELOCITIES)
SIZE = 4000


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def past_of(windows: list[Tensor], tau: Tensor) -> Past:
    """From explicit displacements, one (windows, size) tensor for each group."""
    gram = torch.stack([group @ group.t() for group in windows])
    return Past(gram, tau.expand(len(windows), -1).clone())


def even(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.float64)


UNEVEN = torch.tensor([0.5, 2.0, 1.0, 0.25, 1.5, 1.0], dtype=torch.float64)
VELOCITY = gaussian(SIZE, seed=5)


def straight(tau: Tensor) -> Tensor:
    return tau[:, None] * VELOCITY


def ahead(*times: float) -> Tensor:
    return torch.tensor(times, dtype=torch.float64)


@pytest.mark.parametrize("tau", [even(2), even(8), UNEVEN], ids=["two", "eight", "uneven"])
@pytest.mark.parametrize("name", NAMES)
def test_a_straight_trajectory_is_continued_with_full_confidence(name, tau):
    made = forecast(name, past_of([straight(tau)], tau), 10, ahead(0.7), trust_radius=1.0 + 1e-9)
    assert made.forecaster == name
    assert made.horizon_steps == 10
    assert torch.allclose(made.coefficients[0] @ straight(tau), 0.7 * VELOCITY, rtol=1e-6)
    assert made.confidence == pytest.approx(1, abs=1e-6)
    assert made.norm_ratio == pytest.approx(1, abs=1e-6)
    assert made.momentum_time is None


def test_a_bending_trajectory_is_continued_by_the_curve():
    tau = UNEVEN
    clock = torch.cat([torch.zeros(1, dtype=torch.float64), tau.cumsum(0)])[:, None]
    bend = gaussian(SIZE, seed=6)
    windows = (clock * VELOCITY + clock**2 / 2 * bend).diff(dim=0)
    made = forecast("curve", past_of([windows], tau), 10, ahead(0.1), trust_radius=100.0)
    present_velocity = VELOCITY + clock[-1] * bend
    assert torch.allclose(made.coefficients[0] @ windows, 0.1 * present_velocity, rtol=1e-6)


@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_nobody_is_sure_of_pure_noise(name):
    for seed in range(10):
        past = past_of([gaussian(8, SIZE, seed=seed)], even(8))
        assert forecast(name, past, 10, ahead(1.0), trust_radius=1.0).confidence < 0.3


@pytest.mark.parametrize("name", [*AVERAGING, "auto"])
def test_the_noise_of_single_windows_averages_out(name):
    past = past_of([gaussian(8, SIZE)], even(8))
    assert forecast(name, past, 10, ahead(1.0), trust_radius=1.0).norm_ratio < 0.5
    assert forecast("persistence", past, 10, ahead(1.0), trust_radius=1.0).norm_ratio == pytest.approx(1)


def test_every_group_that_has_moved_moves():
    tau = even(6)
    windows = [gaussian(6, SIZE), straight(tau), torch.zeros(6, SIZE, dtype=torch.float64)]
    made = forecast("line_fit", past_of(windows, tau), 10, ahead(1.0, 1.0, 1.0), 1.0)
    assert [bool(made.coefficients[group].any()) for group in range(3)] == [True, True, False]
    alone = forecast("line_fit", past_of(windows[:1], tau), 10, ahead(1.0), 1.0)
    assert torch.equal(alone.coefficients[0], made.coefficients[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strength", [0.5, 1.0, 3.0])
def test_confidence_is_the_cosine_with_the_true_drift(name, strength):
    tau = UNEVEN
    drift = strength * VELOCITY
    windows = tau[:, None] * drift + tau.sqrt()[:, None] * gaussian(6, SIZE, seed=1)
    made = forecast(name, past_of([windows], tau), 10, ahead(1.0), trust_radius=1.0)
    jump = made.coefficients[0] @ windows
    cosine = torch.nn.functional.cosine_similarity(jump, drift, dim=0).item()
    assert made.confidence == pytest.approx(cosine, abs=0.03)
    assert 0.2 < cosine < 0.999  # neither trivial


def test_confidence_rises_with_the_signal():
    tau = even(8)
    found = []
    for strength in (0.0, 0.3, 1.0, 3.0, 30.0):
        windows = strength * straight(tau) + gaussian(8, SIZE, seed=2)
        found.append(forecast("line_fit", past_of([windows], tau), 10, ahead(1.0), 1.0).confidence)
    assert found == sorted(found)
    assert found[0] < 0.3 and found[-1] > 0.99


def test_windows_that_turn_round_give_no_confidence():
    tau = even(6)
    back_and_forth = straight(tau) * torch.tensor([1.0, -1.0] * 3, dtype=torch.float64)[:, None]
    made = forecast("auto", past_of([back_and_forth], tau), 10, ahead(1.0), 1.0)
    assert made.confidence == 0
    assert made.norm_ratio == pytest.approx(0, abs=1e-6)


def length(past: Past, made: Forecast, group: int) -> float:
    c = made.coefficients[group]
    return math.sqrt(max(float(c @ past.gram[group] @ c), 0.0))


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    count=st.integers(2, 8),
    strength=st.floats(0, 5),
    time=st.floats(0.01, 100),
    trust_radius=st.floats(0.01, 5),
    seed=st.integers(0, 1000),
)
def test_no_group_goes_beyond_its_trust_radius(name, count, strength, time, trust_radius, seed):
    tau = 0.1 + gaussian(count, seed=seed).abs()
    windows = [strength * tau[:, None] * VELOCITY[:50] + gaussian(count, 50, seed=seed + k) for k in range(2)]
    past = past_of(windows, tau)
    made = forecast(name, past, 10, ahead(time, time / 2), trust_radius)
    for group in range(2):
        assert length(past, made, group) <= trust_radius * windows[group][-1].norm().item() * (1 + 1e-9)
    assert 0 <= made.confidence <= 1
    assert torch.isfinite(made.coefficients).all()


def test_the_trust_radius_shortens_without_turning():
    tau = even(6)
    windows = straight(tau) * torch.linspace(2, 1, 6, dtype=torch.float64)[:, None]  # slowing down
    past = past_of([windows], tau)
    free = forecast("line_fit", past, 10, ahead(1.0), trust_radius=1000.0)
    held = forecast("line_fit", past, 10, ahead(1.0), trust_radius=0.5)
    assert length(past, held, 0) == pytest.approx(0.5 * windows[-1].norm().item())
    assert length(past, free, 0) > windows[-1].norm().item()
    ratio = held.coefficients / free.coefficients
    assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio))
    assert held.confidence == pytest.approx(free.confidence)


@pytest.mark.parametrize("name", NAMES)
def test_a_displacement_is_proportional_to_the_learning_rate_time_ahead(name):
    tau = UNEVEN
    windows = straight(tau) + 0.3 * gaussian(6, SIZE)
    past = past_of([windows], tau)
    near, far = (forecast(name, past, 10, ahead(time), 1.0).coefficients for time in (0.1, 0.3))
    assert torch.allclose(3 * near, far)


def test_the_same_horizon_moves_less_as_the_learning_rate_decays():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=100)
    moved = []
    past = past_of([straight(even(4))], even(4))
    for _ in range(9):
        for _ in range(10):
            optimizer.step()
            scheduler.step()
        times = look_ahead(optimizer, scheduler, 10)
        assert times is not None
        moved.append(length(past, forecast("line_fit", past, 10, ahead(*times), 1.0), 0))
    assert moved == sorted(moved, reverse=True)
    # From step 90 on 10, 9, ... 1 hundredths of the rate are left; from step 10 on 90, 89, ... 81.
    assert moved[-1] / moved[0] == pytest.approx(sum(range(1, 11)) / sum(range(81, 91)))


def test_no_learning_rate_ahead_means_no_displacement():
    made = forecast("auto", past_of([straight(even(4))], even(4)), 10, ahead(0.0), 1.0)
    assert not made.coefficients.any()
    assert made.confidence == 0


def test_auto_is_the_most_confident_of_those_that_average():
    for seed in range(5):
        windows = 0.5 * straight(UNEVEN) + gaussian(6, SIZE, seed=seed)
        past = past_of([windows], UNEVEN)
        each = {name: forecast(name, past, 10, ahead(1.0), 1.0) for name in AVERAGING}
        auto = forecast("auto", past, 10, ahead(1.0), 1.0)
        assert auto.confidence == max(made.confidence for made in each.values())
        assert torch.equal(auto.coefficients, each[auto.forecaster].coefficients)


def test_jumps_are_judged_at_the_mean_of_recent_weights():
    made = forecast("line_fit", past_of([straight(UNEVEN)] * 2, UNEVEN), 10, ahead(1.0, 1.0), 1.0)
    assert torch.equal(made.denoise, torch.stack([directions.denoise(UNEVEN)] * 2))


def test_the_momentum_forecaster_moves_along_a_fading_momentum_and_no_window():
    past = past_of([straight(even(4))] * 2, even(4))
    made = forecast("momentum", past, 10, ahead(1.0, 0.5), trust_radius=0.5)
    fading = sum(0.9**k for k in range(1, 11)) / 10
    assert made.momentum_time is not None
    assert torch.allclose(made.momentum_time, ahead(1.0, 0.5) * fading * 0.5)
    assert not made.coefficients.any() and not made.denoise.any()
    assert made.coefficients.shape == made.denoise.shape == (2, 4)
    assert made.confidence == pytest.approx(1, abs=1e-6)
    assert made.norm_ratio <= 0.5  # its length is bounded by the trust radius too


def test_the_momentum_forecaster_is_as_sure_as_the_windows_agree():
    noise = forecast("momentum", past_of([gaussian(8, SIZE)], even(8)), 10, ahead(1.0), 1.0)
    assert noise.confidence < 0.3
    few = Past(torch.ones(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    assert MIN_WINDOWS == 2
    assert forecast("momentum", few, 10, ahead(1.0), 1.0).confidence == 0


def test_figures_of_the_history_are_put_in_order_of_the_weight_groups():
    gram = torch.zeros(3, 2, 2, dtype=torch.float64)
    past = stack_past(gram, [(0.1, 0.5), (0.2, 0.6)], lr_groups=[1, 0, 1])
    assert past.tau.tolist() == [[0.5, 0.6], [0.1, 0.2], [0.5, 0.6]]
    assert past.gram is gram
    assert past.windows == 2


def test_windows_without_learning_rate_do_no_harm():
    windows = straight(torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    past = stack_past((windows @ windows.t())[None], [(0.0,), (1.0,), (1.0,)], [0])
    for name in [*NAMES, "auto"]:
        made = forecast(name, past, 10, ahead(1.0), 1.0)
        assert torch.isfinite(made.coefficients).all()
        assert torch.allclose(made.coefficients[0] @ windows, VELOCITY, rtol=0.5)
