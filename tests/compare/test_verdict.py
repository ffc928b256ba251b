"""Verdicts: what may be claimed, and what may not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from hybridtrainer.compare.curve import Curve, Point
from hybridtrainer.compare.verdict import Comparison, judge, level, median_target

EVALUATIONS = 50


def rising(
    speed: float = 1.0,
    top: float = 1.0,
    seconds: float = 1.0,
    noise: Callable[[], float] = lambda: 0.0,
    evaluations: int = EVALUATIONS,
) -> Curve:
    """An accuracy that comes near `top`; `seconds` is the time of a step."""
    points = (
        Point(step, step * seconds, top * (1 - math.exp(-speed * step / 15)) + noise(), 2.0 * step, step)
        for step in range(1, evaluations + 1)
    )
    return Curve(tuple(points), higher_is_better=True)


def compared(
    ours: list[Curve],
    theirs: list[Curve],
    target: float | None = 0.9,
    tolerance: float = 0.002,
    median_of: str = "",
) -> Comparison:
    return judge("hybrid", "plain", ours, theirs, lambda seeds: target, tolerance, "accuracy", median_of)


def timing(seed: int, spread: float = 0.02, mean: float = 1.0) -> list[float]:
    draw = random.Random(seed)
    return [mean * math.exp(draw.gauss(0, spread)) for _ in range(5)]


PLAIN = [rising(seconds=seconds) for seconds in timing(1)]


def test_a_run_like_plain_is_not_distinguishable():
    found = compared([rising(seconds=seconds) for seconds in timing(2)], PLAIN)
    assert found.verdict == "not distinguishable"
    assert "cannot be told apart" in found.sentence and "5 seeds" in found.sentence


def test_ten_percent_slower_is_found():
    found = compared([rising(seconds=seconds) for seconds in timing(2, mean=1.1)], PLAIN)
    assert found.verdict == "slower"
    assert found.speedup is not None and found.speedup.interval.mean == pytest.approx(1 / 1.1, abs=0.03)
    assert found.compute is not None and found.compute.interval.mean == pytest.approx(1.0)


def test_faster_in_time_and_in_compute_is_found():
    found = compared([rising(speed=1.5, seconds=seconds) for seconds in timing(2)], PLAIN)
    assert found.verdict == "faster"
    assert found.speedup is not None and found.compute is not None
    assert found.speedup.interval.mean == pytest.approx(1.4, abs=0.1)
    assert found.compute.interval.mean == pytest.approx(1.4, abs=0.1)
    assert found.sentence.startswith("hybrid is 1.")


def test_one_percent_of_accuracy_lost_is_found_although_it_is_faster():
    noise = random.Random(4)
    ours = [rising(speed=2.0, top=0.99, noise=lambda: noise.gauss(0, 0.002)) for _ in range(5)]
    theirs = [rising(speed=2.0, noise=lambda: noise.gauss(0, 0.002), seconds=1.5) for _ in range(5)]
    found = compared(ours, theirs)
    assert found.verdict == "quality lost"
    assert found.speedup is not None and found.speedup.interval.low is not None and found.speedup.interval.low > 1
    assert "worse by 0.01" in found.sentence


def test_a_loss_within_the_tolerance_is_none():
    ours, theirs = [rising(speed=3, top=0.999)] * 5, [rising(speed=3)] * 5
    assert compared(ours, theirs).verdict != "quality lost"
    assert compared(ours, theirs, tolerance=0.0).verdict == "quality lost"


def test_an_arm_that_misses_the_target_loses_quality():
    found = compared([rising(top=0.85)] * 5, PLAIN)
    assert found.verdict == "quality lost" and "does not reach accuracy 0.9" in found.sentence
    assert found.speedup is None


def test_an_arm_that_fails_once_is_not_called_faster():
    found = compared([rising(speed=2.0)] * 4 + [rising(top=0.5)], PLAIN)
    assert found.verdict == "not distinguishable" and "does not reach accuracy 0.9" in found.sentence
    # Where the mean of all still gets there, resamples in which it does not forbid the claim.
    found = compared([rising(speed=3.0)] * 4 + [rising(top=0.75)], PLAIN)
    assert found.verdict == "not distinguishable"
    assert found.speedup is not None
    assert found.speedup.interval.mean > 1 and found.speedup.interval.low == 0.0
    assert found.speedup.per_seed[-1] is None
    assert "95% interval never to" in found.sentence
    assert found.sentence.endswith(" The target was missed by hybrid in 1 of 5 seeds.")


def test_seeds_that_missed_the_target_are_counted_for_both_arms():
    found = compared([rising()] * 3 + [rising(top=0.85)] * 2, [rising(top=0.85), *PLAIN[1:]])
    assert found.sentence.endswith(" The target was missed by hybrid in 2 of 5 seeds and by plain in 1 of 5 seeds.")
    assert "missed" not in compared(PLAIN, PLAIN).sentence


def broken(kind: str) -> Curve:
    """A run that reaches the target early and has nothing to show in the end."""
    points = rising(speed=4.0).points
    if kind == "nan in the end":
        late = (Point(p.step, p.seconds, math.nan, p.step, p.step) for p in points[35:])
        return Curve((*points[:35], *late), higher_is_better=True)
    return Curve(points[:25] if kind == "diverged" else (), True, diverged=True)


@pytest.mark.parametrize("kind", ["nan in the end", "diverged", "diverged at once"])
@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_whoever_diverges_after_reaching_the_target_loses_quality(kind, seeds):
    found = compared([rising(speed=4.0)] * (5 - seeds) + [broken(kind)] * seeds, PLAIN)
    assert found.verdict == "quality lost" and f"in {seeds} of 5 seeds" in found.sentence
    # Where the baseline fails in the same seeds there is nothing to compare with.
    theirs = [*PLAIN[: 5 - seeds], *[broken(kind)] * seeds]
    assert compared([rising(speed=4.0)] * (5 - seeds) + [broken(kind)] * seeds, theirs).verdict == "no verdict"


def test_an_arm_whose_end_may_be_worse_is_not_called_faster():
    collapsed = [Point(p.step, p.seconds, 0.1 if p.step > 40 else p.value, 1, 1) for p in rising(speed=4.0).points]
    found = compared([rising(speed=4.0)] * 4 + [Curve(tuple(collapsed), True)], PLAIN)
    assert found.verdict == "not distinguishable" and "is not called faster" in found.sentence


def test_a_target_that_neither_reaches_gives_no_verdict():
    found = compared([rising(speed=2.0)] * 5, PLAIN, target=0.9999)
    assert found.verdict == "no verdict" and "plain itself does not reach accuracy 0.9999" in found.sentence
    for target in (0.9999, None):
        same = compared(PLAIN, PLAIN, target=target)
        assert (same.verdict, same.at_least, same.compute_at_least) == ("no verdict", None, None)


def test_a_target_that_only_the_arm_reaches_bounds_how_fast_it_is():
    ours = [rising(speed=2.0, seconds=seconds) for seconds in timing(2)]
    theirs = [rising(top=0.8, seconds=seconds) for seconds in timing(1)]
    found = compared(ours, theirs)
    assert found.verdict == "faster" and found.speedup is None and found.compute is None
    assert "is at least 2." in found.sentence and "plain does not get there and stay there in its" in found.sentence
    assert found.sentence.endswith(" The target was missed by plain in 5 of 5 seeds.")
    assert found.at_least is not None and found.compute_at_least is not None
    reached = ours[0].reached(0.9)
    assert reached is not None
    assert found.at_least.per_seed[0] == pytest.approx(theirs[0].points[-1].seconds / reached.seconds)
    assert found.compute_at_least.per_seed[0] == pytest.approx(theirs[0].points[-1].compute / reached.compute)
    assert found.compute_at_least.interval.mean == pytest.approx(found.compute_at_least.per_seed[0], rel=0.01)
    assert compared(ours, PLAIN).at_least is None  # both reach it: there is a ratio


def test_a_seed_in_which_the_baseline_gets_there_has_the_ratio_itself():
    theirs = [rising(top=0.8)] * 4 + [rising(speed=1.5)]
    found = compared([rising(speed=1.5)] * 4 + [rising(speed=1.5)], theirs)
    assert found.at_least is not None
    assert found.at_least.per_seed[0] is not None and found.at_least.per_seed[0] > 1.5
    assert found.at_least.per_seed[-1] == 1.0


def test_an_arm_that_reaches_it_in_one_seed_of_five_is_not_called_faster():
    found = compared([rising(speed=3.0)] + [rising(top=0.85)] * 4, [rising(top=0.8)] * 5)
    assert found.verdict == "no verdict" and found.at_least is None
    # Nor where that one seed lifts the mean of all over the target.
    found = compared([rising(speed=3.0)] + [rising(speed=3.0, top=0.895)] * 4, [rising(top=0.8)] * 5)
    assert found.at_least is not None and found.at_least.interval.mean > 1
    assert found.verdict == "no verdict" and "95% interval of that bound never to" in found.sentence
    assert found.at_least.per_seed[1:] == (None,) * 4


def test_an_arm_that_takes_longer_than_the_whole_run_of_the_baseline_is_not_called_slower():
    found = compared([rising(seconds=3.0)] * 5, [rising(top=0.8)] * 5)
    assert found.at_least is not None and found.at_least.interval.mean < 1
    assert found.verdict == "no verdict" and "does not show that it is faster" in found.sentence


@pytest.mark.parametrize("kind", ["diverged", "diverged at once"])
def test_a_baseline_that_diverged_before_the_target_bounds_nothing(kind):
    theirs = [rising(top=0.8)] * 4 + [broken(kind)]
    found = compared([rising(speed=4.0)] * 5, theirs)
    assert (found.verdict, found.at_least, found.compute_at_least) == ("no verdict", None, None)
    assert "plain itself does not reach accuracy 0.9" in found.sentence


def test_an_arm_that_ends_worse_than_a_baseline_that_misses_the_target_loses_quality():
    collapsed = [Point(p.step, p.seconds, 0.1 if p.step > 40 else p.value, 1, 1) for p in rising(speed=4.0).points]
    found = compared([Curve(tuple(collapsed), True)] * 5, [rising(top=0.8)] * 5)
    assert found.verdict == "quality lost" and found.at_least is not None


def test_a_baseline_that_misses_the_median_of_its_own_runs_is_explained():
    """Three runs are at their median or above; the mean of all five is below it."""
    theirs = [rising(top=top) for top in (0.9, 0.9, 0.9, 0.5, 0.5)]
    target = median_target([level(curve) for curve in theirs], 0.002, True)
    own = compared(PLAIN, theirs, target=target, median_of="plain")
    assert own.verdict == "no verdict" and own.at_least is None
    assert "the median run of plain had reached at 90% of its length" in own.sentence
    assert "Train longer, or give a target with --target." in own.sentence
    for given in (compared(PLAIN, theirs, target=target), compared(PLAIN, theirs, target=target, median_of="another")):
        assert given.at_least is not None and "median" not in given.sentence


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_or_two_seeds_give_no_verdict(seeds):
    found = compared([rising(speed=2.0)] * seeds, PLAIN[:seeds])
    assert found.verdict == "no verdict" and f"{seeds} seed" in found.sentence


def test_quality_at_equal_time_uses_the_shorter_run():
    found = compared([rising(speed=1.0, seconds=0.5)] * 5, [rising(speed=1.0)] * 5)
    assert found.equal_time is not None and found.equal_steps is not None
    # At the end of the fast run, 25 s, plain has made half of its steps.
    expected = (rising().at(50, lambda p: p.step) or 0) - (rising().at(25, lambda p: p.step) or 0)
    assert found.equal_time.interval.mean == pytest.approx(expected)
    assert found.equal_steps.interval.mean == 0.0


def test_for_a_loss_lower_is_better():
    def falling(speed: float) -> Curve:
        points = tuple(Point(p.step, p.seconds, 2 - p.value, 1, 1) for p in rising(speed).points)
        return Curve(points, higher_is_better=False)

    found = compared([falling(2.0)] * 5, [falling(1.0)] * 5, target=1.1)
    assert found.verdict == "faster"
    assert found.final_quality is not None and found.final_quality.interval.mean > 0


def test_the_target_is_what_the_median_run_has_at_ninety_percent():
    levels = [level(rising(top=top)) for top in (0.5, 0.9, 0.7, 0.8, 0.6)]
    assert median_target(levels, 0.0, True) == rising(top=0.7).at(45, lambda point: point.step)
    assert level(Curve((), True)) is None
    assert all(median_target(levels, 0.0, True) is None for levels in ([0.5, None], [0.5, math.nan], []))


def test_the_target_is_relaxed_by_the_tolerance_for_better_or_worse():
    assert median_target([0.9], 0.01, True) == pytest.approx(0.891)
    assert median_target([2.0], 0.01, False) == pytest.approx(2.02)
    assert median_target([-2.0], 0.01, False) == pytest.approx(-1.98)


def test_a_comparison_is_plain_data():
    document = compared(PLAIN, PLAIN).to_dict()
    assert document["speedup"]["per_seed"] == [1.0] * 5
    assert (document["speedup"]["low"], document["speedup"]["high"]) == (1.0, 1.0)
    assert document["at_least"] is None and document["compute_at_least"] is None
    bounded = compared([rising(speed=2.0)] * 5, [rising(top=0.8)] * 5).to_dict()
    assert bounded["speedup"] is None and bounded["at_least"]["low"] > 1 and len(bounded["at_least"]["per_seed"]) == 5
