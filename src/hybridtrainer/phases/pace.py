"""How fast the loss falls now, which is what a real step is worth. Pure.

Over a few hundred steps the noise of batches is larger than the fall of the loss, and over more of them a line is
steeper than the curve is at its end, because curves flatten. So the curve of the whole run is kept, in bins, and a
power law is fitted to its newer half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import mul
from typing import Any, Self

MOST_BINS = 64  # then each two become one
LEAST_BINS = 8  # that a law is fitted to
NEWER = 0.5  # share of the run that it is fitted to
NEWEST = 0.25  # share in which a change of pace is looked for
MIN_LOSSES = 16


@dataclass(frozen=True)
class Course:
    """The losses of a run, as means of so many steps each.

    Attributes:
        steps: Real steps seen.
        width: Steps in a bin.
        bins: Sum of the losses, number of losses and sum of their steps, oldest first.
    """

    steps: int = 0
    width: int = 1
    bins: tuple[tuple[float, int, int], ...] = ()

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`."""
        return cls(tree["steps"], tree["width"], tuple((loss, count, step) for loss, count, step in tree["bins"]))

    def to_tree(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    def add(self, loss: float) -> Course:
        """With the loss of one more step.

        >>> course = Course()
        >>> for loss in range(1000):
        ...     course = course.add(loss)
        >>> course.steps, course.width, sum(count for _, count, _ in course.bins)
        (1000, 16, 1000)
        """
        steps = self.steps + 1
        if self.bins and self.bins[-1][1] < self.width:
            total, count, at = self.bins[-1]
            return Course(steps, self.width, (*self.bins[:-1], (total + loss, count + 1, at + steps)))
        bins, width = (*self.bins, (loss, 1, steps)), self.width
        if len(bins) > MOST_BINS:
            pairs = zip(bins[::2], (*bins[1::2], (0.0, 0, 0)), strict=False)
            bins = tuple((a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs)
            width *= 2
        return Course(steps, width, bins)

    def anew(self) -> Course:
        """Without the losses so far, where they say nothing about what follows."""
        return Course(self.steps)


def progress_per_step(course: Course, newest: Sequence[float]) -> float | None:
    """How fast the loss falls now, per real step; None if unknown, 0 where it does not fall.

    Neither a guess that flatters jumps nor one that can be had from a few losses: the slope, at the last step, of the
    power law through the newer half of the run, and its standard error. Where the newest losses alone are sure that
    it falls faster, as where a schedule lowers the rate, theirs counts.

    Args:
        course: Of the run.
        newest: Its last losses, one by one, oldest first.
    """
    bins = [each for each in course.bins if each[2] > NEWER * course.steps * each[1]]
    if len(bins) < LEAST_BINS or sum(count for _, count, _ in bins) < MIN_LOSSES:
        return None
    slope, error = _of_law(bins, course.steps)
    recent = newest[-max(MIN_LOSSES, int(NEWEST * course.steps)) :]
    line, unsure = _line([float(step) for step in range(len(recent))], recent, [1] * len(recent))
    return max(-slope + error, -line - unsure, 0.0)


def _of_law(bins: Sequence[tuple[float, int, int]], steps: int) -> tuple[float, float]:
    """Slope at the last step, and its standard error: a line over the logarithm of steps, and of losses if it can."""
    counts = [count for _, count, _ in bins]
    times = [math.log(step / count / steps) for _, count, step in bins]
    losses = [total / count for total, count, _ in bins]
    if min(losses) <= 0:
        slope, error = _line(times, losses, counts)
        return slope / steps, error / steps
    logarithms = [math.log(loss) for loss in losses]
    slope, error = _line(times, logarithms, counts)
    now = math.exp(_mean(logarithms, counts) - slope * _mean(times, counts))
    return slope * now / steps, error * now / steps


def _line(times: Sequence[float], values: Sequence[float], weights: Sequence[int]) -> tuple[float, float]:
    """Slope of the weighted least-squares line, and its standard error."""
    middle, level = _mean(times, weights), _mean(values, weights)
    apart = [time - middle for time in times]
    pull = list(map(mul, weights, apart))
    square = sum(map(mul, pull, apart))
    slope = sum(map(mul, pull, values)) / square
    rest = [value - level - slope * time for value, time in zip(values, apart, strict=True)]
    spread = sum(weight * each * each for weight, each in zip(weights, rest, strict=True)) / (len(rest) - 2)
    return slope, math.sqrt(spread / square)


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total: float = sum(map(mul, values, weights))
    return total / sum(weights)
