"""The watch: quiet over healthy noise, quick to see what is wrong, and never blind afterwards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

import numpy
import pytest
import torch
from tests.support import digit_splits, take

from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.models.cnn import CNN, CNNConfig, image_loss
from hybridtrainer.phases.divergence import (
    LOSS_WINDOW,
    MIN_LOSSES,
    Watch,
    level_and_spread,
    not_recovered,
    observe,
    observe_bad,
)
from hybridtrainer.phases.pace import Course
from hybridtrainer.weights import gradient_norm

SIGMA = 3.0
ALLOWED = 0.001  # of healthy steps


def watched(losses: Iterable[float], norms: Sequence[float] | None = None, watch: Watch | None = None) -> Watch:
    watch = watch or Watch()
    for index, loss in enumerate(losses):
        watch, _ = observe(watch, loss, 1.0 if norms is None else norms[index], SIGMA)
    return watch


def findings(losses: Iterable[float], norms: Sequence[float] | None = None, watch: Watch | None = None) -> list[str]:
    watch, found = watch or Watch(), []
    for index, loss in enumerate(losses):
        watch, finding = observe(watch, loss, 1.0 if norms is None else norms[index], SIGMA)
        if finding is not None:
            found.append(finding)
    return found


def noise(count: int, level: float = 2.0, spread: float = 0.2, seed: int = 0) -> list[float]:
    values: list[float] = (level + spread * numpy.random.default_rng(seed).standard_normal(count)).tolist()
    return values


def test_gaussian_noise_raises_hardly_an_alarm():
    assert len(findings(noise(20_000))) <= ALLOWED * 20_000


def test_a_falling_noisy_loss_raises_hardly_an_alarm():
    trend = [1 + 4 * math.exp(-step / 1500) for step in range(10_000)]
    losses = [a + b for a, b in zip(trend, noise(10_000, 0.0), strict=True)]
    assert len(findings(losses)) <= ALLOWED * 10_000


def test_heavy_tailed_noise_raises_hardly_an_alarm():
    losses = (3 + 0.3 * numpy.random.default_rng(0).standard_t(5, 20_000)).tolist()
    assert len(findings(losses)) <= ALLOWED * 20_000


def recorded(steps: int, batch_size: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a real training run that goes well."""
    torch.manual_seed(0)
    model = CNN(CNNConfig((8, 16, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for batch in take(PositionedLoader(digit_splits().train, batch_size, seed=0), steps):
        loss = image_loss(model, batch).mean()
        loss.backward()
        norms.append(gradient_norm(model.parameters()).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.slow
def test_a_real_training_run_at_a_small_batch_raises_hardly_an_alarm():
    losses, norms = recorded(steps=2500, batch_size=8)
    assert sum(losses[-100:]) / 100 < 0.2 < losses[0]  # it did go well
    assert len(findings(losses, norms)) <= ALLOWED * 2500


def test_spikes_of_ten_sigma_are_found_at_once():
    found = 0
    for seed in range(100):
        watch = watched(noise(50, seed=seed))
        _, finding = observe(watch, 2.0 + 10 * 0.2, 1.0, SIGMA)
        found += finding is not None
        assert finding is None or "sigma above" in finding
    assert found >= 99


def test_a_spike_is_seen_although_another_came_shortly_before():
    watch = watched(noise(100))
    watch, _ = observe(watch, 2.9, 1.0, SIGMA)  # suspicious, not confirmed
    assert watch.suspects == 1
    assert 2.9 not in watch.losses  # it does not widen what counts as usual
    watch = watched(noise(10, seed=1), watch=watch)
    _, finding = observe(watch, 4.0, 1.0, SIGMA)
    assert finding is not None


def test_a_suspicious_loss_needs_a_second_one():
    watch = watched(noise(100))
    high = 2.0 + 4.5 * 0.2
    once, finding = observe(watch, high, 1.0, SIGMA)
    assert finding is None
    _, finding = observe(once, high, 1.0, SIGMA)
    assert finding is not None and "sigma above" in finding
    calmed, _ = observe(once, 2.0, 1.0, SIGMA)
    _, finding = observe(calmed, high, 1.0, SIGMA)
    assert finding is None


def test_a_low_loss_is_no_alarm():
    assert findings([*noise(100), 0.1, 0.1, 0.1]) == []


@pytest.mark.parametrize("sigma", [2.0, 3.0, 6.0])
def test_the_limit_is_the_one_configured(sigma):
    watch = watched(noise(LOSS_WINDOW, spread=0.1))
    assert observe(watch, 2.0 + 0.7 * sigma * 0.1, 1.0, sigma)[0].suspects == 0
    assert observe(watch, 2.0 + 1.4 * sigma * 0.1, 1.0, sigma)[0].suspects == 1


def test_few_losses_are_not_judged():
    assert findings([*noise(MIN_LOSSES - 1), 1000.0]) == []
    assert findings([*noise(MIN_LOSSES), 1000.0]) != []


def test_a_smooth_curve_does_not_make_the_watch_nervous():
    assert findings([2.0] * 100 + [2.02] * 10) == []
    assert findings([2.0] * 100 + [2.5] * 2) != []


def test_a_level_shift_does_not_alarm_for_ever():
    found = findings([*noise(200), *noise(2000, level=5.0, seed=1)])
    assert 1 <= len(found) <= 3


def test_after_an_alarm_the_watch_starts_anew():
    watch = watched(noise(200))
    watch, finding = observe(watch, 50.0, 1.0, SIGMA)
    assert finding is not None
    assert watch == Watch(course=Course(steps=watch.course.steps)) and watch.course.steps > 190


@pytest.mark.parametrize(("factor", "words"), [(11.0, "over 10 times"), (0.009, "under 0.01")])
def test_exploding_and_vanishing_gradients_are_found_when_there_are_two_in_a_row(factor, words):
    norms = [0.5 + 0.1 * math.sin(step) for step in range(100)]
    watch = watched(noise(100), norms)
    once, finding = observe(watch, 2.0, 0.5 * factor, SIGMA)
    assert finding is None and once.suspects == 1
    _, finding = observe(once, 2.0, 0.5 * factor, SIGMA)
    assert finding is not None and words in finding
    calmed, _ = observe(once, 2.0, 0.5, SIGMA)
    assert observe(calmed, 2.0, 0.5 * factor, SIGMA)[1] is None


@pytest.mark.parametrize("factor", [8.0, 0.02])
def test_gradients_that_change_less_are_no_alarm(factor):
    assert findings([*noise(100), 2.0, 2.0, 2.0], [0.5] * 100 + [0.5 * factor] * 3) == []


def swinging(count: int, growth: float, width: float = 0.02) -> list[float]:
    return [2.0 + width * (-1) ** step * growth**step for step in range(count)]


def test_swings_are_named_as_such():
    found = findings([*noise(60, spread=0.01), *swinging(75, 1.05, width=0.05)])
    assert any("swings" in finding for finding in found)


@pytest.mark.parametrize("growth", [1.04, 1.06, 1.08, 1.1])
@pytest.mark.parametrize("width", [0.01, 0.02, 0.05])
def test_a_loss_that_swings_ever_wider_is_found_before_it_doubles(growth, width):
    steps = next(step for step in range(1000) if width * growth**step > 2.0)
    assert findings([*noise(60, spread=0.01), *swinging(steps, growth, width)])


def test_a_loss_that_swings_ever_less_or_evenly_is_no_alarm():
    assert findings(swinging(200, 0.97)) == []
    assert findings(swinging(200, 1.0)) == []


def healthy() -> Watch:
    return Watch(tuple(noise(50)), (1.0,) * 32)


def test_a_bad_step_leaves_the_statistics_as_they_are_and_is_counted():
    watch = observe_bad(observe_bad(healthy()))
    assert watch.bad == 2
    assert (watch.losses, watch.norms) == (healthy().losses, healthy().norms)
    after, _ = observe(watch, 2.0, 1.0, SIGMA)
    assert after.bad == 0
    suspicious, _ = observe(watch, 2.9, 1.0, SIGMA)
    assert suspicious.bad == 0  # finite, so not one more in a row


@pytest.mark.parametrize("watch", [Watch(), healthy()], ids=["new", "healthy"])
@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_what_is_not_finite_never_enters_the_window(watch, loss, norm):
    for _ in range(3):
        watch, _ = observe(watch, loss, norm, SIGMA)
        assert all(map(math.isfinite, (*watch.losses, *watch.norms)))


def test_the_window_is_bounded():
    watch = watched(noise(3 * LOSS_WINDOW))
    assert len(watch.losses) == LOSS_WINDOW
    assert len(watch.norms) < LOSS_WINDOW
    assert list(watch.losses) == noise(3 * LOSS_WINDOW)[-LOSS_WINDOW:]


def test_a_watch_survives_as_plain_values():
    watch = Watch((1.5, 2.5), (0.5, 0.25), 1, 2, course=Course().add(1.5).add(2.5))
    assert Watch.from_tree(json.loads(json.dumps(watch.to_tree()))) == watch


def test_level_and_spread_are_those_of_the_newest_losses_around_their_trend():
    assert level_and_spread(tuple(noise(MIN_LOSSES - 1))) is None
    found = level_and_spread(tuple(noise(200, level=3.0, spread=0.5)))
    assert found is not None
    assert found[0] == pytest.approx(3.0, abs=0.3)
    assert found[1] == pytest.approx(0.5, rel=0.4)
    steep = level_and_spread(tuple(10 - 0.1 * step for step in range(50)))
    assert steep is not None and steep[1] < 0.1  # the trend is not spread


def test_losses_like_those_before_have_recovered_and_higher_ones_have_not():
    before = tuple(noise(100))
    assert not_recovered(before, noise(5, seed=1), SIGMA) is None
    assert not_recovered(before, [1.0] * 5, SIGMA) is None
    reason = not_recovered(before, [2.5] * 5, SIGMA)
    assert reason is not None and "mean loss 2.5000 after correction is above" in reason


def test_more_losses_say_more():
    before = tuple(noise(100))
    assert not_recovered(before, [2.4], SIGMA) is None
    assert not_recovered(before, [2.4] * 20, SIGMA) is not None


def test_recovery_cannot_be_judged_by_too_few_losses_before():
    assert not_recovered(tuple(noise(MIN_LOSSES - 1)), [100.0], SIGMA) is None


@pytest.mark.parametrize("size", [1e-200, 1e-110, 1e120, 1e150])
def test_losses_of_any_size_can_be_watched(size):
    assert findings([size * value for value in noise(200)]) == []
