"""The average run of an arm: when the mean over seeds of its smoothed metric reaches a target and stays there.

Single runs are too uneven for that question: on a plateau half of a baseline's own runs never reach its median. Their
mean does, and resampling the seeds says how sure it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median

from hybridtrainer.compare.curve import HOLD, Curve, Point
from hybridtrainer.compare.interval import Interval, stretched

CELLS = 240  # of the axis on which runs are averaged
RESAMPLES = 2000

Clock = Callable[[Point], float]
Seeds = tuple[int, ...]


class AverageRun:
    """Runs of one arm, put on a common axis.

    Args:
        curves: One for each seed.
        clock: The axis: seconds, steps or compute of a point. A run that has ended stays where it was.
    """

    def __init__(self, curves: Sequence[Curve], clock: Clock) -> None:
        smoothed = [curve.smoothed for curve in curves]
        self._complete = bool(smoothed) and all(smoothed)
        if not self._complete:
            return
        self._higher_is_better = curves[0].higher_is_better
        self._begin = max(clock(points[0]) for points in smoothed)
        self.end = max(clock(points[-1]) for points in smoothed)
        self._cell = (self.end - self._begin) / CELLS
        self._hold = math.ceil(CELLS * HOLD / max(1.0, median(map(len, smoothed))))
        places = [self._begin + self._cell * cell for cell in range(CELLS + 1)]
        self._rows = [[_or_nan(curve.at(place, clock)) for place in places] for curve in curves]

    def reached(self, seeds: Seeds, target: float) -> float | None:
        """What the clock shows when the mean of these runs reaches the target for good; None if it never does."""
        if not self._complete:
            return None
        means = [sum(column) / len(seeds) for column in zip(*(self._rows[seed] for seed in seeds), strict=True)]
        good = [mean >= target if self._higher_is_better else mean <= target for mean in means]
        for cell, _ in enumerate(means):
            if all(good[cell : cell + self._hold + 1]):
                share = 0.0
                if cell and math.isfinite(means[cell - 1]) and means[cell] != means[cell - 1]:
                    share = (means[cell] - target) / (means[cell] - means[cell - 1])
                return self._begin + self._cell * (cell - share)
        return None


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
            return min(0.0, _log_ratio(theirs.end, ours.end))
        return -math.inf if us is None else _log_ratio(theirs.end if them is None else them, us)

    everyone = tuple(range(seeds))
    goal = target(everyone)
    if goal is None or ours.reached(everyone, goal) is None or theirs.reached(everyone, goal) is None:
        return None
    centre = log_ratio(everyone)
    if seeds < 2:
        return Interval(math.exp(centre), None, None)
    draw = random.Random(seed)
    ratios = sorted(log_ratio(tuple(sorted(draw.choices(everyone, k=seeds)))) for _ in range(RESAMPLES))
    return stretched(centre, ratios, seeds).map(math.exp)


def _log_ratio(one: float, other: float) -> float:
    return math.log(max(one, 1e-12) / max(other, 1e-12))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
