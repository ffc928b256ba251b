"""Where the loss is heading: honest intervals on real losses, better than persistence, and nothing absurd."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from pathlib import Path

import pytest
from benchmarks.outlook import judge, smoothed

from hybridtrainer.observe.outlook import LEAST_LOSSES, Outlook, smoothing_steps
from hybridtrainer.records import LossForecast

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))


def real_losses(path: Path) -> tuple[dict[int, float], int]:
    """Losses of a real run by the clock; steps that were foreseen have none."""
    found = json.loads(path.read_text())["losses"]
    return {step: loss for step, loss in enumerate(found, 1) if loss is not None}, len(found)


def law(step: float) -> float:
    return 2 + 3 / math.sqrt(step)


def fed(steps: int, until: int, noise: float = 0.0, seed: int = 0) -> Outlook:
    source, outlook = random.Random(seed), Outlook(steps)
    for step in range(1, until + 1):
        outlook.observe(step, law(step) + source.gauss(0, noise))
    return outlook


def only(outlook: Outlook, target: int) -> LossForecast:
    (forecast,) = outlook.forecast(target)
    return forecast


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_on_real_losses_the_intervals_cover_and_the_error_is_below_that_of_persistence(path):
    losses, steps = real_losses(path)
    outcomes, _ = judge(losses, steps)
    for found in outcomes.values():
        assert len(found) > 35
        assert statistics.fmean(outcome.covered for outcome in found) >= 0.8
        error = statistics.fmean(outcome.error for outcome in found)
        assert error < 0.75 * statistics.fmean(outcome.persistence_error for outcome in found)


def test_over_all_real_losses_nine_of_ten_intervals_cover_and_not_by_being_endless():
    near, final = [], []
    for path in TRACES:
        outcomes, _ = judge(*real_losses(path))
        near += outcomes["near"]
        final += outcomes["final"]
    assert 0.85 <= statistics.fmean(outcome.covered for outcome in near) <= 0.97
    assert 0.85 <= statistics.fmean(outcome.covered for outcome in final) <= 0.99
    later = [outcome for outcome in final if outcome.made_at > 0.5]
    assert statistics.median(outcome.width for outcome in later) < 12 * statistics.median(o.error for o in later)


@pytest.mark.parametrize("power", [0.3, 0.5, 1.0])
def test_a_power_law_is_found_in_noise(power):
    misses = 0
    for seed in range(20):
        source, outlook = random.Random(seed), Outlook(1000)
        for step in range(1, 301):
            outlook.observe(step, 2 + 3 * step**-power + source.gauss(0, 0.1))
        truth = statistics.fmean(2 + 3 * step**-power for step in range(951, 1001))
        forecast = only(outlook, 1000)
        misses += not forecast.low <= truth <= forecast.high
        assert abs(forecast.loss - truth) < 0.25
    assert misses <= 4


def test_nothing_is_forecast_before_enough_is_known():
    outlook = Outlook(1000)
    assert outlook.forecast(1000) == []
    for step in range(1, LEAST_LOSSES):
        outlook.observe(step, law(step))
    assert outlook.forecast(1000) == []
    assert len(fed(1000, 100).forecast(150, 1000)) == 2


def test_a_forecast_says_when_and_for_when_it_was_made():
    near, final = fed(1000, 100).forecast(150, 1000)
    assert (near.step, near.target_step, final.step, final.target_step) == (100, 150, 100, 1000)
    assert near.low < near.loss < near.high
    assert final.high - final.low > near.high - near.low


def test_losses_that_are_no_number_are_left_out():
    clean, dirty = Outlook(500), Outlook(500)
    for step in range(1, 200):
        clean.observe(step, law(step))
        dirty.observe(step, law(step))
        dirty.observe(step + 1, math.nan)
        dirty.observe(step + 1, math.inf)
    assert dirty.forecast(300, 500) == clean.forecast(300, 500)


def test_what_was_rolled_back_is_forgotten():
    straight, back = fed(500, 200), fed(500, 150)
    for step in range(160, 180):
        back.observe(step, 50.0)  # after a jump that went wrong
    for step in range(151, 201):
        back.observe(step, law(step))
    ours, theirs = only(back, 500), only(straight, 500)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)


def test_foreseen_steps_leave_a_gap_and_no_harm():
    outlook = Outlook(600)
    for step in range(1, 300):
        if step % 40 < 25:
            outlook.observe(step, law(step))
    assert only(outlook, 600).loss == pytest.approx(law(585), abs=0.03)


def test_own_errors_widen_the_intervals():
    def width(shocks: float) -> float:
        source, outlook = random.Random(1), Outlook(1000)
        for step in range(1, 501):
            level = shocks * (step // 60 % 2)  # steps that no curve foresees
            outlook.observe(step, 2 + level + source.gauss(0, 0.05))
            if step % 20 == 0:
                outlook.forecast(min(1000, step + 50), 1000)
        errors = dict(outlook._errors)
        outlook._errors = dict.fromkeys(errors, (0.0, 0.0))
        naive = only(outlook, 550)
        outlook._errors = errors
        heeded = only(outlook, 550)
        return (heeded.high - heeded.low) / (naive.high - naive.low)

    assert width(0.5) > 1.3 * width(0.0)


@pytest.mark.parametrize("start", [1e-3, 2.3, 1e6])
def test_a_loss_that_never_was_negative_is_not_forecast_so(start):
    outlook = Outlook(1000)
    for step in range(1, 200):
        outlook.observe(step, start * math.exp(-step / 40))
        for forecast in outlook.forecast(min(1000, step + 50), 1000):
            assert 0 <= forecast.low <= forecast.loss <= forecast.high <= 8 * start


def test_a_loss_may_be_negative():
    outlook = Outlook(1000)
    for step in range(1, 400):
        outlook.observe(step, -law(step))
    forecast = only(outlook, 1000)
    assert forecast.low < -law(975) < forecast.high
    assert forecast.loss < 0


def test_a_loss_that_explodes_or_stands_still_is_survived():
    for values in ([2.0] * 200, *([2.0] * 100 + [10.0 ** (k * n) for k in range(100)] for n in (1, 3, -3))):
        outlook = Outlook(1000)
        for step, loss in enumerate(values, 1):
            outlook.observe(step, loss)
            for forecast in outlook.forecast(1000):
                assert math.isfinite(forecast.loss) and forecast.low <= forecast.loss <= forecast.high


def test_near_the_end_what_is_known_already_counts():
    outlook = fed(1000, 999, noise=0.2)
    truth = statistics.fmean(law(step) for step in range(951, 1001))
    forecast = only(outlook, 1000)
    assert forecast.high - forecast.low < 0.1
    assert abs(forecast.loss - truth) < 0.1


def test_a_long_run_costs_no_more_than_a_short_one():
    def seconds(steps: int) -> float:
        outlook = fed(steps, steps // 2)
        took = []
        for _ in range(9):
            began = time.perf_counter()
            outlook.forecast(steps)
            took.append(time.perf_counter() - began)
        return min(took)

    assert seconds(60_000) < 4 * seconds(600)


def test_the_smoothing_window_is_a_twentieth_of_the_run():
    assert (smoothing_steps(20), smoothing_steps(1000)) == (10, 50)
    assert smoothed({9: 1.0, 10: 3.0}, 10, 2) == 2.0
    assert smoothed({}, 10, 2) is None
