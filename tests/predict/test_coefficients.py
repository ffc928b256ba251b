"""Learned coefficients: what windows of drift and noise must teach, and that nothing else decides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtrainer.predict.baselines import Past
from hybridtrainer.predict.coefficients import LEAST_WINDOWS, Coefficients, Fit

SIZE = 4000
WINDOWS = 8


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Walk:
    """Windows of one group that come one after the other, and the momentum that each began with."""

    def __init__(self, windows: Tensor, momenta: Tensor | None = None, tau: Tensor | None = None) -> None:
        self.windows = windows
        self.momenta = torch.zeros(len(windows) + 1, windows.shape[1], dtype=torch.float64)
        if momenta is not None:
            self.momenta[: len(momenta)] = momenta
        self.tau = torch.ones(len(windows), dtype=torch.float64) if tau is None else tau

    def past(self, until: int) -> Past:
        kept = slice(max(0, until - WINDOWS), until)
        return Past((self.windows[kept] @ self.windows[kept].T)[None], self.tau[None, kept])

    def momentum(self, number: int, until: int) -> Tensor:
        kept = self.windows[max(0, until - WINDOWS) : until]
        own = self.momenta[number]
        return torch.cat([kept @ own, (own @ own)[None]])[None]

    def teach(self, learned: Coefficients) -> list[Fit]:
        found = [
            learned.learn(self.past(until), self.momentum(until - 1, until))
            for until in range(1, len(self.windows) + 1)
        ]
        assert all(fit is None for fit in found[: LEAST_WINDOWS - 1])
        return [fit for fit in found if fit is not None]

    def values(self, learned: Coefficients) -> list[float]:
        count = len(self.windows)
        found: list[float] = learned.values(self.past(count), self.momentum(count, count), self.tau[-1:])[0].tolist()
        return found


def noisy(strength: float, count: int = 60, seed: int = 0) -> Tensor:
    return strength * gaussian(SIZE, seed=99) + gaussian(count, SIZE, seed=seed)


@pytest.mark.parametrize("strength", [0.1, 0.3, 1.0, 3.0])
def test_the_drift_goes_on_as_far_as_it_is_more_than_noise(strength):
    walk, learned = Walk(noisy(strength)), Coefficients(1)
    fits = walk.teach(learned)
    drift, bend, momentum = walk.values(learned)
    wiener = strength**2 / (strength**2 + 1 / WINDOWS)  # the best that can be done with a mean of so many windows
    assert drift == pytest.approx(wiener, abs=0.12)
    assert abs(bend) < 0.12
    assert momentum == 0
    assert fits[-1].error < 1.02 / (1 + strength**2) + 0.1


def test_what_windows_showed_long_ago_fades():
    walk, learned = Walk(torch.cat([noisy(1.0), gaussian(60, SIZE, seed=7)])), Coefficients(1)
    walk.teach(learned)
    drift, _, _ = walk.values(learned)
    assert drift < 0.2  # with all windows counting alike it would be what both halves say together


def test_what_is_learned_forecasts_better_than_the_prior():
    walk, learned = Walk(noisy(0.2)), Coefficients(1)
    taught = walk.teach(learned)
    untaught = [Coefficients(1).learn(walk.past(until), walk.momentum(until - 1, until)) for until in range(40, 61)]
    assert sum(fit.error for fit in taught[-21:]) < sum(fit.error for fit in untaught if fit) - 21 * 0.05


def test_a_velocity_that_changes_is_learned():
    clock = torch.arange(40, dtype=torch.float64)[:, None]
    walk, learned = Walk(gaussian(SIZE, seed=1) + 0.2 * clock * gaussian(SIZE, seed=2)), Coefficients(1)
    fits = walk.teach(learned)
    _, bend, _ = walk.values(learned)
    assert bend > 0.8  # the mean velocity is that of half a span ago, and the halves are half a span apart
    assert fits[-1].error < 0.01


def test_momentum_counts_where_windows_follow_it():
    momenta = gaussian(61, SIZE, seed=3)
    walk, learned = Walk(0.4 * momenta[:60] + 0.1 * gaussian(60, SIZE, seed=4), momenta), Coefficients(1)
    walk.teach(learned)
    drift, _, momentum = walk.values(learned)
    assert momentum == pytest.approx(0.4 * 20 / 22, abs=0.03)  # twenty windows count, and two that were never there
    assert abs(drift) < 0.2


def test_a_fit_is_the_error_of_the_forecast_that_would_have_been_made():
    momenta = gaussian(13, SIZE, seed=5)
    walk, learned = Walk(noisy(0.5, 12), momenta, 0.5 + gaussian(12, seed=6).abs()), Coefficients(1)
    for until in range(1, 12):
        learned.learn(walk.past(until), walk.momentum(until - 1, until))
    before, came = walk.past(12), walk.windows[11]
    kept = walk.windows[12 - WINDOWS : 11]
    own = Past(before.gram[:, :-1, :-1], before.tau[:, :-1])
    products = torch.cat([kept @ momenta[11], (momenta[11] @ momenta[11])[None]])[None]
    made = learned.forecast(own, products, 10, walk.tau[11:12], trust_radius=1e9)
    assert made.momentum_time is not None
    displacement = made.coefficients[0] @ kept + made.momentum_time[0] * momenta[11]
    fit = learned.learn(before, walk.momentum(11, 12))
    assert fit is not None
    assert fit.error == pytest.approx(float((came - displacement).square().sum() / came.square().sum()), rel=1e-9)
    assert fit.length == pytest.approx(float(displacement.square().sum() / came.square().sum()), rel=1e-9)


@pytest.mark.parametrize("radius", [0.01, 0.5, 1.0])
def test_no_jump_is_longer_than_the_trust_radius(radius):
    momenta = gaussian(21, SIZE, seed=7)
    walk, learned = Walk(noisy(2.0, 20) + momenta[:20], momenta), Coefficients(1)
    walk.teach(learned)
    made = learned.forecast(walk.past(20), walk.momentum(20, 20), 10, torch.tensor([3.0]), radius)
    assert made.momentum_time is not None
    kept = walk.windows[-WINDOWS:]
    displacement = made.coefficients[0] @ kept + made.momentum_time[0] * momenta[20]
    newest = kept[-1].norm()
    assert displacement.norm() <= radius * newest * (1 + 1e-9)
    assert made.norm_ratio == pytest.approx(float(displacement.norm() / (3 * newest)), rel=1e-9)
    assert made.forecaster == "learned" and made.horizon_steps == 10
    assert 0 < made.confidence <= 1


def test_the_gain_scales_the_jump():
    walk, learned = Walk(noisy(1.0, 20)), Coefficients(1)
    walk.teach(learned)
    whole, half = (
        learned.forecast(walk.past(20), walk.momentum(20, 20), 10, torch.tensor([1.0]), 1e9, gain)
        for gain in (1.0, 0.5)
    )
    assert torch.allclose(half.coefficients, whole.coefficients / 2)
    assert half.confidence == pytest.approx(whole.confidence)


def test_without_momentum_nothing_goes_along_it_and_noise_goes_hardly_anywhere():
    walk, learned = Walk(noisy(1.0, 20)), Coefficients(1)
    walk.teach(learned)
    made = learned.forecast(walk.past(20), walk.momentum(20, 20), 10, torch.tensor([1.0]), 1.0)
    assert made.momentum_time is None
    assert made.coefficients.any()
    noise = Walk(gaussian(20, SIZE, seed=8), gaussian(21, SIZE, seed=9))
    still = learned.forecast(noise.past(20), noise.momentum(20, 20), 10, torch.tensor([1.0]), 1.0)
    assert still.confidence < 0.3 and still.norm_ratio < 0.5


def test_weights_that_stand_still_teach_nothing_and_break_nothing():
    walk, learned = Walk(torch.zeros(6, 10, dtype=torch.float64)), Coefficients(1)
    assert walk.teach(learned) == []
    made = learned.forecast(walk.past(6), walk.momentum(6, 6), 10, torch.tensor([1.0]), 1.0)
    assert torch.isfinite(made.coefficients).all() and not made.coefficients.any()


def test_what_was_learned_is_put_back_to_the_bit():
    walk, learned, other = Walk(noisy(0.5, 20)), Coefficients(1), Coefficients(1)
    walk.teach(learned)
    other.restore({name: value.clone() for name, value in learned.state().items()})
    assert other.values(walk.past(20), walk.momentum(20, 20), torch.ones(1)).equal(
        learned.values(walk.past(20), walk.momentum(20, 20), torch.ones(1))
    )
    assert walk.values(other) != walk.values(Coefficients(1))
