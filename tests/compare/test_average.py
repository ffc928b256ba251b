"""Average runs: when their mean reaches a target, and how sure the ratio of two of them is."""

from __future__ import annotations

import math
import random

import pytest
from tests.compare.test_verdict import rising

from hybridtrainer.compare.average import AverageRun, average_moment, least_ratio, speed_ratio
from hybridtrainer.compare.curve import Curve, Point
from hybridtrainer.compare.interval import Interval


def seconds(point: Point) -> float:
    return point.seconds


def test_of_one_run_it_is_the_run_itself():
    for target in (0.5, 0.8, 0.9):
        alone = rising().reached(target)
        assert alone is not None
        assert AverageRun([rising()], seconds).reached((0,), target) == pytest.approx(alone.seconds, abs=0.02)


def test_runs_of_uneven_speed_are_averaged_at_equal_clock():
    """Times may differ as they like: where the metric is the same, so is the step, and the time is the mean."""
    runs = [rising(seconds=seconds) for seconds in (0.5, 1.0, 3.0)]
    alone = AverageRun([rising()], seconds).reached((0,), 0.9)
    assert alone is not None
    assert AverageRun(runs, seconds).reached((0, 1, 2), 0.9) == pytest.approx(1.5 * alone)
    assert AverageRun(runs, seconds).reached((0, 0, 0), 0.9) == pytest.approx(0.5 * alone)


def test_on_a_plateau_a_slowdown_is_seen_as_it_is():
    draw = random.Random(3)
    flat = [rising(speed=4, top=0.97, noise=lambda: draw.gauss(0, 0.003)) for _ in range(5)]
    times = [math.exp(draw.gauss(0, 0.03)) for _ in range(10)]

    def timed(curve: Curve, factor: float) -> Curve:
        return Curve(tuple(Point(p.step, p.seconds * factor, p.value, p.step, p.step) for p in curve.points), True)

    plain = [timed(curve, factor) for curve, factor in zip(flat, times[:5], strict=True)]
    slower = [timed(curve, 1.1 * factor) for curve, factor in zip(flat, times[5:], strict=True)]
    mean, low, high = ratio(slower, plain, target=0.967)
    assert mean == pytest.approx(1 / 1.1, rel=0.04) and low > 0.8 and high < 1


def test_seeds_count_as_often_as_they_are_drawn():
    run = AverageRun([rising(top=0.8), rising(top=1.0)], seconds)
    assert run.reached((0, 0), 0.85) is None
    assert run.reached((1, 1), 0.85) == pytest.approx(AverageRun([rising()] * 2, seconds).reached((0,), 0.85))
    both = run.reached((0, 1), 0.85)
    assert both is not None and both > (run.reached((1, 1), 0.85) or 0)


def test_a_plateau_that_half_of_the_runs_miss_is_reached_by_their_mean():
    draw = random.Random(1)
    runs = [rising(speed=3, top=0.95 + 0.01 * seed, noise=lambda: draw.gauss(0, 0.002)) for seed in range(5)]
    target = 0.965
    assert sum(run.reached(target) is None for run in runs) == 2
    assert AverageRun(runs, seconds).reached(tuple(range(5)), target) is not None


def test_a_short_visit_is_not_reaching():
    spiked = tuple(Point(s, s, 1.0 if 20 <= s < 25 else 0.0, s, s) for s in range(1, 60))
    assert AverageRun([Curve(spiked, True)], seconds).reached((0,), 0.9) is None


def test_a_run_without_evaluations_never_reaches_anything():
    assert AverageRun([rising(), Curve((), True)], seconds).reached((0, 1), 0.1) is None
    assert AverageRun([], seconds).reached((), 0.1) is None


def test_the_moment_of_the_average_run_has_step_time_and_samples_of_all_seeds():
    uneven = [rising(seconds=pace, top=top) for pace, top in ((1.0, 1.0), (2.0, 1.0), (3.0, 0.8))]
    assert uneven[2].reached(0.85) is None
    moment = average_moment(uneven, 0.85)
    assert moment is not None
    assert moment.seconds == pytest.approx(2.0 * moment.step)  # the seed that failed is in the mean
    assert moment.forward_samples == pytest.approx(2 * moment.step)
    assert moment.backward_samples == pytest.approx(moment.step)
    assert average_moment(uneven, 0.99) is None and average_moment([], 0.5) is None


def ratio(ours: list[Curve], theirs: list[Curve], target: float = 0.9) -> tuple[float, float, float]:
    found = speed_ratio(AverageRun(ours, seconds), AverageRun(theirs, seconds), len(ours), lambda seeds: target)
    assert found is not None and found.low is not None and found.high is not None
    return found.mean, found.low, found.high


def test_equal_runs_have_a_ratio_of_one_without_width():
    assert ratio([rising()] * 5, [rising()] * 5) == (1.0, 1.0, 1.0)


def test_a_ratio_in_time_is_found_with_an_interval_that_holds_it():
    draw = random.Random(7)

    def noisy(factor: float) -> list[Curve]:
        return [rising(seconds=factor * math.exp(draw.gauss(0, 0.05))) for _ in range(5)]

    hits = 0
    for _ in range(40):
        mean, low, high = ratio(noisy(1.0), noisy(1.25))
        assert mean == pytest.approx(1.25, rel=0.12)
        hits += low <= 1.25 <= high
    assert hits >= 34


def test_resamples_in_which_we_fail_and_those_in_which_plain_fails_cannot_flatter_us():
    uneven = [rising(speed=3)] * 4 + [rising(speed=3, top=0.75)]
    _, low, _ = ratio(uneven, [rising()] * 5)
    assert low == 0.0
    mean, _, high = ratio([rising()] * 5, [rising()] * 4 + [rising(top=0.8)])
    assert mean < high < 2.5  # the end of plain's run is what is known


def test_where_both_fail_nothing_is_gained():
    quick = [rising(seconds=0.5)] * 4 + [rising(top=0.8, seconds=0.5)]
    slow = [rising()] * 4 + [rising(top=0.8)]
    mean, low, _ = ratio(quick, slow)
    assert mean == pytest.approx(2.0) and low < 1  # draws of the fifth seed alone say nothing about speed
    assert ratio(slow, slow)[1:] == (1.0, 1.0)


def test_a_target_that_one_of_them_misses_has_no_ratio():
    missed = AverageRun([rising(top=0.5)] * 3, seconds)
    assert speed_ratio(missed, AverageRun([rising()] * 3, seconds), 3, lambda seeds: 0.9) is None
    assert speed_ratio(AverageRun([rising()] * 3, seconds), missed, 3, lambda seeds: 0.9) is None
    assert speed_ratio(missed, missed, 3, lambda seeds: None) is None


def test_one_seed_has_a_ratio_without_limits():
    found = speed_ratio(AverageRun([rising(2.0)], seconds), AverageRun([rising()], seconds), 1, lambda seeds: 0.9)
    assert found is not None and found.mean > 1 and found.low is None and found.high is None


def least(ours: list[Curve], theirs: list[Curve], target: float = 0.9) -> Interval | None:
    return least_ratio(AverageRun(ours, seconds), AverageRun(theirs, seconds), len(ours), lambda seeds: target)


def cut(curve: Curve, share: float) -> Curve:
    return Curve(curve.points[: round(len(curve.points) * share)], curve.higher_is_better)


def test_a_lower_bound_is_never_larger_than_what_the_true_ratio_could_be():
    """Runs that are cut off before the target: however they would have gone on, the bound holds."""
    draw = random.Random(5)
    for _ in range(20):
        whole = [rising(speed=draw.uniform(0.5, 1), seconds=draw.uniform(0.7, 1.4), evaluations=90) for _ in range(4)]
        ours = [rising(speed=draw.uniform(1, 4), seconds=draw.uniform(0.7, 1.4)) for _ in range(4)]
        truth = speed_ratio(AverageRun(ours, seconds), AverageRun(whole, seconds), 4, lambda seeds: 0.9)
        found = least(ours, [cut(curve, 0.25) for curve in whole])
        assert truth is not None and found is not None and found.low is not None
        assert found.low <= found.mean < truth.mean


def test_a_bound_is_the_whole_run_over_the_time_to_the_target():
    arm = AverageRun([rising(speed=2.0)] * 3, seconds).reached((0, 1, 2), 0.9)
    found = least([rising(speed=2.0)] * 3, [rising(top=0.8, seconds=pace) for pace in (1.0, 2.0, 3.0)])
    assert arm is not None and found is not None
    assert found.mean == pytest.approx(50 * 2.0 / arm)


def test_samples_in_which_the_baseline_gets_there_have_the_ratio_itself():
    """The fourth of four is quick: samples in which it is often drawn get there, and what they show is no bound."""
    missing, mixed = [rising(top=0.85)] * 4, [rising(top=0.85)] * 3 + [rising(speed=3.0, top=0.95)]
    never, sometimes = least([rising(speed=3.0)] * 4, missing), least([rising(speed=3.0)] * 4, mixed)
    assert never is not None and never.low == pytest.approx(never.mean)
    assert sometimes is not None and sometimes.low is not None and sometimes.mean == pytest.approx(never.mean)
    assert sometimes.low < never.mean / 1.5


@pytest.mark.parametrize("theirs", [0.5, 0.85])
def test_samples_in_which_we_miss_the_target_bound_nothing(theirs):
    """Whether or not the baseline has ended sooner: in such a sample we may never get there."""
    found = least([rising(speed=3.0)] * 4 + [rising(top=0.75)], [rising(top=theirs, seconds=9.0)] * 5)
    assert found is not None and found.mean > 9 and found.low == 0.0


def test_there_is_a_bound_only_where_we_reach_the_target_and_the_baseline_does_not():
    reaches, misses = [rising()] * 3, [rising(top=0.5)] * 3
    assert least(reaches, misses) is not None
    assert least(reaches, reaches) is None and least(misses, reaches) is None and least(misses, misses) is None
    assert least(reaches, [*misses[1:], Curve((), True)]) is None
    one = least(reaches[:1], misses[:1])
    assert one is not None and one.low is None and one.high is None
    nothing = least_ratio(AverageRun(reaches, seconds), AverageRun(misses, seconds), 3, lambda seeds: None)
    assert nothing is None
