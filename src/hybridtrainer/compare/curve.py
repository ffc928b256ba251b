"""What one run reached and when: smoothed evaluations, the moment a target is reached for good, quality at a moment.

Pure: points in, numbers out. A first lucky hit does not count, and neither does a value that does not last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

WINDOW = 5  # evaluations in a smoothed one
HOLD = 5  # smoothed evaluations that must stay at the target after the first


@dataclass(frozen=True)
class Point:
    """One evaluation of a run.

    Attributes:
        step: The run's clock.
        seconds: Training time so far; evaluations and checkpoints are not in it.
        value: The metric; NaN where it could not be measured.
        forward_samples: Samples that have gone through the model so far, those of probes included.
        backward_samples: Samples whose gradient has been computed so far.
    """

    step: float
    seconds: float
    value: float
    forward_samples: float = 0.0
    backward_samples: float = 0.0

    @property
    def compute(self) -> float:
        """Cost in forward passes of one sample; a backward pass counts as two."""
        return self.forward_samples + 2 * self.backward_samples


@dataclass(frozen=True)
class Curve:
    """The evaluations of one run, oldest first.

    >>> falling = Curve(tuple(Point(step, step / 10, 8 - step) for step in range(9)), higher_is_better=False)
    >>> falling.reached(3.5).step
    6.5
    """

    points: tuple[Point, ...]
    higher_is_better: bool
    diverged: bool = False

    @property
    def broken(self) -> bool:
        """Whether the run did not end with a finite metric."""
        end = self.final()
        return self.diverged or end is None or not math.isfinite(end.value)

    @cached_property
    def smoothed(self) -> list[Point]:
        """Each evaluation as the mean of itself and the four before it; the first four are left out."""
        return [_mean_point(self.points[end - WINDOW : end]) for end in range(WINDOW, len(self.points) + 1)]

    def reached(self, target: float) -> Point | None:
        """Where the smoothed metric reaches the target and stays there, None if it never does.

        It must stay for the next `HOLD` evaluations, or to the end of the run where fewer are left. Between two
        evaluations the moment is interpolated.
        """
        points = self.smoothed
        good = [self._meets(point.value, target) for point in points]
        for index, point in enumerate(points):
            if all(good[index : index + HOLD + 1]):
                return point if not index else _crossing(points[index - 1], point, target)
        return None

    def final(self) -> Point | None:
        """The smoothed metric at the end."""
        points = self.smoothed
        return points[-1] if points else None

    def at(self, moment: float, clock: Callable[[Point], float]) -> float | None:
        """The smoothed metric when `clock` of a point, its step or its seconds, shows `moment`.

        None before the first smoothed evaluation; after the last one what that was.
        """
        points = self.smoothed
        if not points or clock(points[0]) > moment:
            return None
        return along(points, [moment], lambda point: point.value, clock)[0]

    def _meets(self, value: float, target: float) -> bool:
        return value >= target if self.higher_is_better else value <= target


def along(
    points: Sequence[Point],
    places: Sequence[float],
    quantity: Callable[[Point], float],
    clock: Callable[[Point], float] = lambda point: point.step,
) -> list[float]:
    """A quantity of the points at rising places of a clock, interpolated; beyond the ends it is that of the end."""
    found: list[float] = []
    last = 0
    for place in places:
        while last + 1 < len(points) and clock(points[last + 1]) <= place:
            last += 1
        here = points[last]
        after = points[min(last + 1, len(points) - 1)]
        width = clock(after) - clock(here)
        share = min(1.0, max(0.0, (place - clock(here)) / width)) if width > 0 else 0.0
        found.append(quantity(here) + (quantity(after) - quantity(here)) * share if share else quantity(here))
    return found


def _mean_point(points: Sequence[Point]) -> Point:
    """The mean value, at the moment of the newest point: nobody knew it earlier."""
    last = points[-1]
    value = fmean(point.value for point in points)
    return Point(last.step, last.seconds, value, last.forward_samples, last.backward_samples)


def _crossing(before: Point, after: Point, target: float) -> Point:
    distance = after.value - before.value
    share = (target - before.value) / distance if math.isfinite(before.value) and distance else 1.0

    def between(one: float, other: float) -> float:
        return one + (other - one) * share

    return Point(
        between(before.step, after.step),
        between(before.seconds, after.seconds),
        target,
        between(before.forward_samples, after.forward_samples),
        between(before.backward_samples, after.backward_samples),
    )
