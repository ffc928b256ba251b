"""Long series made short without losing what stands out, and noisy ones smooth. Knows points, nothing of runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeVar

Point = tuple[float, float | None]
"""x and y; a y of None is a gap."""

SHORTEST_WINDOW = 10
"""Steps that a smoothed value is a mean of, about."""

Item = TypeVar("Item")


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most about `limit` points: of each stretch its lowest and its highest, in their order, and its gap if any.

    The first and the last point stay. A spike therefore is never lost, which a mean or every n-th point would do.

    >>> thin([(0, 1.0), (1, 9.0), (2, 2.0), (3, 1.0), (4, 2.0), (5, 1.0)], 4)
    [(0, 1.0), (1, 9.0), (3, 1.0), (5, 1.0)]
    """
    if len(points) <= limit:
        return list(points)
    stretches = max(1, (limit - 2) // 2)
    inner = points[1:-1]
    kept: set[int] = {0, len(points) - 1}
    for stretch in range(stretches):
        begin, end = stretch * len(inner) // stretches, (stretch + 1) * len(inner) // stretches
        heights = [(height, at) for at in range(begin, end) if (height := inner[at][1]) is not None]
        if heights:
            kept |= {min(heights)[1] + 1, max(heights)[1] + 1}
        if len(heights) < end - begin:
            kept.add(next(at for at in range(begin, end) if inner[at][1] is None) + 1)
    return [points[at] for at in sorted(kept)]


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """At most `limit` items, evenly spread, the first and the last among them.

    >>> spread(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= limit:
        return list(items)
    if limit < 2:
        return list(items[-1:])
    return [items[round(at * (len(items) - 1) / (limit - 1))] for at in range(limit)]


def smooth(values: Sequence[float | None], window: float = SHORTEST_WINDOW) -> list[float | None]:
    """The running mean of a series, newer values counting more; gaps stay gaps and are not counted.

    Each value has the weight 1 - 1 / `window` of the one after it, so that about the last `window` of them count.

    >>> smooth([1.0, None, 1.0])
    [1.0, None, 1.0]
    """
    weight = 1 - 1 / window
    mean = total = 0.0
    smoothed: list[float | None] = []
    for value in values:
        if value is not None:
            mean, total = weight * mean + value, weight * total + 1
        smoothed.append(None if value is None else mean / total)
    return smoothed


def forward_only(xs: Sequence[float]) -> list[int]:
    """Which entries are left when going back in x takes back what was made there: a roll-back of the clock.

    >>> forward_only([1, 2, 5, 6, 3, 4])
    [0, 1, 4, 5]
    """
    kept: list[int] = []
    for at, x in enumerate(xs):
        while kept and xs[kept[-1]] >= x:
            kept.pop()
        kept.append(at)
    return kept


def value_at(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The height at x of a series that rises in x, on the line between its neighbours; None outside.

    >>> value_at([(0.0, 1.0), (10.0, 2.0)], 5.0)
    1.5
    """
    if not points or x < points[0][0] or x > points[-1][0]:
        return None
    after = bisect_left(points, x, key=lambda point: point[0])
    (x0, y0), (x1, y1) = points[max(0, after - 1)], points[after]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
