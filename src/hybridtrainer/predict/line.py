"""The line through two averages of the weights: where on it the loss is likely lowest.

A place on it is a number: at 0 is the shorter average and at -1 the longer one; in between is what a window in between
would have, and beyond 0 what both say the weights are by now without their noise. Losses are measured at three places;
elsewhere they are about a parabola, which says where to look next. Knows no weights and no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PLACES = (-1.0, 0.0, 0.5)
"""Where losses are measured first; none is looked for outside of them."""


def lowest_place(losses: Sequence[float]) -> float:
    """The place of the lowest loss by the parabola through those at `PLACES`; one of them where there is no valley.

    >>> [round(lowest_place([(place - lowest) ** 2 for place in PLACES]), 3) for lowest in (-0.6, 0.25, 7.0)]
    [-0.6, 0.25, 0.5]
    """
    first, second, third = PLACES
    if all(map(math.isfinite, losses)):
        slope = (losses[1] - losses[0]) / (second - first)
        bend = ((losses[2] - losses[1]) / (third - second) - slope) / (third - first)
        if bend > 0:
            return min(third, max(first, (first + second) / 2 - slope / (2 * bend)))
    return min(zip(losses, PLACES, strict=True), key=lambda pair: pair[0] if math.isfinite(pair[0]) else math.inf)[1]
