"""The average run of an arm: when the mean over seeds of its smoothed metric reaches a target and stays there.

Single runs are too uneven for that question: on a plateau half of a baseline's own runs never reach its median. Their
mean does, and resampling the seeds says how sure it is. Where a baseline never gets there, its whole run is known to
be too short: the ratio then has a lower bound and no upper one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean, median

from hybridtrainer.compare.curve import HOLD, Curve, Point, along
from hybridtrainer.compare.interval import Interval, stretched

CELLS = 240  # of the axis on which runs are averaged
RESAMPLES = 2000

Cost = Callable[[Point], float]
Seeds = tuple[int, ...]


class AverageRun:
    """Runs of one arm, averaged at equal clock.

    Not at equal time: where the metric hardly rises any more, a little noise in the times of single runs would move
    the moment of reaching a target by a lot.

    Args:
        curves: One for each seed. A run that has ended stays where it was.
        cost: What it takes to get to a point: its seconds, or its compute.

    Attributes:
        complete: Whether every run has a smoothed evaluation; without that none of them reaches anything.
    """

    def __init__(self, curves: Sequence[Curve], cost: Cost) -> None:
        smoothed = [curve.smoothed for curve in curves]
        self.complete = bool(smoothed) and all(smoothed)
        if not self.complete:
            return
        self._higher_is_better = curves[0].higher_is_better
        begin = max(points[0].step for points in smoothed)
        cell = (max(points[-1].step for points in smoothed) - begin) / CELLS
        self._hold = math.ceil(CELLS * HOLD / max(1.0, median(map(len, smoothed))))
        places = [begin + cell * number for number in range(CELLS + 1)]
        self._values = [along(points, places, lambda point: point.value) for points in smoothed]
        self._costs = [along(points, places, cost) for points in smoothed]

    def reached(self, seeds: Seeds, target: float) -> float | None:
        """What these runs cost on average when their mean reaches the target for good; None if it never does."""
        if not self.complete:
            return None
        means = _mean_rows([self._values[seed] for seed in seeds])
        good = [mean >= target if self._higher_is_better else mean <= target for mean in means]
        for cell, _ in enumerate(means):
            if all(good[cell : cell + self._hold + 1]):
                share = 0.0  # of the way back to the cell before
                if cell and math.isfinite(means[cell - 1]) and means[cell] != means[cell - 1]:
                    share = (means[cell] - target) / (means[cell] - means[cell - 1])
                here, before = (fmean(self._costs[seed][at] for seed in seeds) for at in (cell, max(0, cell - 1)))
                return here + (before - here) * share
        return None

    def end(self, seeds: Seeds) -> float:
        """What these runs cost on average up to their end."""
        return fmean(self._costs[seed][-1] for seed in seeds)


def average_moment(curves: Sequence[Curve], target: float) -> Point | None:
    """Where the average run of an arm reaches the target for good: its step, mean time and samples; None if never.

    >>> slow, fast = (Curve(tuple(Point(step, pace * step, step) for step in range(9)), True) for pace in (3.0, 1.0))
    >>> average_moment([slow, fast], 5.0).seconds
    14.0
    """
    everyone = tuple(range(len(curves)))
    costs: tuple[Cost, ...] = (
        lambda point: point.step,
        lambda point: point.seconds,
        lambda point: point.forward_samples,
        lambda point: point.backward_samples,
    )
    found = [AverageRun(curves, cost).reached(everyone, target) for cost in costs]
    step, seconds, forward, backward = found
    if step is None or seconds is None or forward is None or backward is None:
        return None
    return Point(step, seconds, target, forward, backward)


def speed_ratio(
    ours: AverageRun, theirs: AverageRun, seeds: int, target: Callable[[Seeds], float | None], seed: int = 0
) -> Interval | None:
    """How many times as fast our average run reaches the target, with a paired bootstrap interval over the seeds.

    A resample in which the baseline misses the target counts as if it had reached it at its end, one in which we
    do as if we never would, one in which both do as no gain: none of them can flatter us.

    Args:
        ours: The arm.
        theirs: The baseline.
        seeds: How many there are.
        target: The target of a sample of seeds: one that comes from the baseline varies with it.
        seed: Of the resampling.

    Returns:
        None where one of the two does not reach the target with all seeds.
    """

    @cache
    def log_ratio(sample: Seeds) -> float:
        goal = target(sample)
        if goal is None:
            return 0.0
        us, them = ours.reached(sample, goal), theirs.reached(sample, goal)
        if us is None and them is None:
            return min(0.0, _log_ratio(theirs.end(sample), ours.end(sample)))
        return -math.inf if us is None else _log_ratio(theirs.end(sample) if them is None else them, us)

    everyone = tuple(range(seeds))
    goal = target(everyone)
    if goal is None or ours.reached(everyone, goal) is None or theirs.reached(everyone, goal) is None:
        return None
    return _resampled(log_ratio, seeds, seed)


def least_ratio(
    ours: AverageRun, theirs: AverageRun, seeds: int, target: Callable[[Seeds], float | None], seed: int = 0
) -> Interval | None:
    """How many times as fast at least, where we reach the target and the baseline's whole run does not.

    What is estimated is the ratio with the baseline's time cut off at its end. That is never above the true ratio, so
    an interval that holds it from below holds the true one from below too; its upper limit is no limit of the truth.
    A resample in which the baseline reaches the target has the ratio itself, which is smaller still. One in which we
    miss it counts as if we never would, whatever the baseline does: then nothing bounds the ratio from below.

    Args:
        ours: The arm.
        theirs: The baseline; its runs must have trained to their end.
        seeds: How many there are.
        target: The target of a sample of seeds.
        seed: Of the resampling.

    Returns:
        None where we do not reach the target with all seeds, or the baseline does.
    """

    @cache
    def log_least(sample: Seeds) -> float:
        goal = target(sample)
        us = None if goal is None else ours.reached(sample, goal)
        if goal is None or us is None:
            return -math.inf
        them = theirs.reached(sample, goal)
        return _log_ratio(theirs.end(sample) if them is None else them, us)

    everyone = tuple(range(seeds))
    goal = target(everyone)
    if goal is None or not theirs.complete:
        return None
    if ours.reached(everyone, goal) is None or theirs.reached(everyone, goal) is not None:
        return None
    return _resampled(log_least, seeds, seed)


def _resampled(log_ratio: Callable[[Seeds], float], seeds: int, seed: int) -> Interval:
    """The ratio of all seeds, with the interval that drawing them again gives."""
    everyone = tuple(range(seeds))
    centre = log_ratio(everyone)
    if seeds < 2:
        return Interval(math.exp(centre), None, None)
    draw = random.Random(seed)
    ratios = sorted(log_ratio(tuple(sorted(draw.choices(everyone, k=seeds)))) for _ in range(RESAMPLES))
    return stretched(centre, ratios, seeds).map(math.exp)


def _log_ratio(one: float, other: float) -> float:
    return math.log(max(one, 1e-12) / max(other, 1e-12))


def _mean_rows(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
