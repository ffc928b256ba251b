"""Intervals that hold what they promise: scaled by the errors of earlier forecasts of the same run.

An error is told in scales, the forecaster's own idea of its size. What share of errors lies within so many scales is
counted; and because errors of neighbouring forecasts resemble each other, every interval that was missed widens the
next ones and every one that held narrows them a little (adaptive conformal inference, Gibbs and Candes,
arXiv 2106.00170), so that in the long run the promised share holds whatever the errors do.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import NormalDist

from hybridtrainer.tree import Tree

LEVEL = 0.9
REMEMBERED = 80  # errors
PRIOR_ERRORS = 10  # that a normal distribution with the forecaster's own scale is worth
WIDEST = 1.0  # logarithm of the most that missed intervals widen later ones
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # at which calibration is checked
PRIOR = tuple(NormalDist().inv_cdf(0.5 + (k + 0.5) / PRIOR_ERRORS / 2) for k in range(PRIOR_ERRORS))


class Calibration:
    """The errors of one kind of forecast, and the intervals that follow from them.

    Args:
        pace: By how much, as a logarithm, a missed interval widens the next.

    >>> calibration = Calibration()
    >>> for number in range(200):
    ...     calibration.learn(error=2.0 if number % 2 else -1.0)
    >>> calibration.reach() > 2
    True
    """

    def __init__(self, pace: float = 0.12) -> None:
        self._pace = pace
        self._sizes: deque[float] = deque(maxlen=REMEMBERED)
        self._wider = 0.0  # logarithm
        self._hits = [0.0] * len(LEVELS)
        self._judged = 0

    def reach(self, level: float = LEVEL) -> float:
        """Half the width of a central interval, in scales."""
        return _quantile(self._in_order(), level) * math.exp(self._wider)

    def learn(self, error: float) -> None:
        """Takes in an error in scales; the intervals as they are now are judged by it first."""
        size = abs(error)
        if not math.isfinite(size):
            return
        known, wider = self._in_order(), math.exp(self._wider)
        for index, level in enumerate(LEVELS):
            self._hits[index] += size <= _quantile(known, level) * wider
        self._judged += 1
        missed = size > _quantile(known, LEVEL) * wider
        self._wider += self._pace * (missed - (1 - LEVEL)) / LEVEL
        self._wider = max(-WIDEST, min(WIDEST, self._wider))
        self._sizes.append(size)

    def expected_error(self) -> float | None:
        """Mean distance between what share of intervals held and what share should have; None before any."""
        if not self._judged:
            return None
        return math.fsum(abs(hit / self._judged - level) for hit, level in zip(self._hits, LEVELS, strict=True)) / len(
            LEVELS
        )

    def chance_below(self, distance: float) -> float:
        """The chance that what comes is less than so many scales above the forecast; below it where negative."""
        known, wider = self._in_order(), math.exp(self._wider)
        within = sum(size * wider <= abs(distance) for size in known) / len(known)
        return 0.5 + math.copysign(within / 2, distance)

    def _in_order(self) -> list[float]:
        """The sizes of the errors, those of the prior among them."""
        return sorted((*self._sizes, *PRIOR))

    def state(self) -> dict[str, Tree]:
        """Plain values, for a checkpoint."""
        return {"sizes": list(self._sizes), "wider": self._wider, "hits": list(self._hits), "judged": self._judged}

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned."""
        self._sizes = deque(state["sizes"], maxlen=REMEMBERED)
        self._wider, self._hits, self._judged = state["wider"], list(state["hits"]), state["judged"]


def _quantile(sizes: list[float], level: float) -> float:
    """The size that this share of them does not exceed; they are in order."""
    place = level * (len(sizes) + 1) - 1
    below = max(0, min(len(sizes) - 1, math.floor(place)))
    above = min(len(sizes) - 1, below + 1)
    share = min(1.0, max(0.0, place - below))
    return sizes[below] + share * (sizes[above] - sizes[below])
