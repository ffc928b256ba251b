"""Axes: which range to show, where the ticks are, and where a value lies on paper. Knows no drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

OUTLIER = 6.0
"""How many times the width of the bulk a value may lie outside of it before it is cut off."""


@dataclass(frozen=True)
class Scale:
    """A range of values laid on a range of the picture."""

    low: float
    high: float
    begin: float
    end: float

    @property
    def factor(self) -> float:
        """Picture units for each unit of value."""
        return (self.end - self.begin) / (self.high - self.low)

    @property
    def offset(self) -> float:
        """Where the value 0 lies."""
        return self.begin - self.low * self.factor

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        return self.begin + (value - self.low) * self.factor

    def holds(self, value: float) -> bool:
        """Whether a value lies on the axis, a little slack for rounding included."""
        slack = (self.high - self.low) * 1e-6
        return self.low - slack <= value <= self.high + slack


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values in a range, at most `most` + 1 of them.

    >>> ticks(0, 66), ticks(2.1, 5.3)
    ([0.0, 20.0, 40.0, 60.0], [3.0, 4.0, 5.0])
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(at * step, 12 - math.floor(math.log10(step))) for at in range(first, last + 1)]


def tick_labels(values: list[float]) -> list[str]:
    """Ticks as text, all with the same number of decimals.

    >>> tick_labels([0.0, 0.5, 1.0]), tick_labels([0.0, 50000.0])
    (['0.0', '0.5', '1.0'], ['0', '50,000'])
    """
    most = max((abs(value) for value in values), default=0.0)
    if most and (most >= 1e9 or most < 1e-4):
        for digits in range(3, 16):
            labels = [f"{value:.{digits}g}" for value in values]
            if len(set(labels)) == len(values):
                return labels
    decimals = next((d for d in range(9) if all(abs(round(v, d) - v) <= 1e-9 * most for v in values)), 9)
    return [f"{value:,.{decimals}f}" for value in values]


def span(values: Iterable[float], *, from_zero: bool = False) -> tuple[float, float]:
    """The range from the lowest to the highest value, never of no width."""
    known = list(values)
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    width = high - low
    # Much narrower than this a line's place on paper would be noise of single precision, which is what SVG has.
    least = max(abs(low), abs(high)) * 1e-4
    if width <= least:
        extra = (least or 1.0) / (1 if from_zero else 2)
        low, high = (low if from_zero and low == 0 else low - extra), high + extra
    return low, high


def padded(values: Iterable[float]) -> tuple[float, float]:
    """The range for a y axis: some air above and below, and lone values far outside the bulk left out."""
    known = sorted(values)
    low, high = span(known)
    if len(known) >= 20:
        bulk_low, bulk_high = known[len(known) // 50], known[-1 - len(known) // 50]
        width = bulk_high - bulk_low
        if width > 0:
            high = high if high <= bulk_high + OUTLIER * width else bulk_high + width
            low = low if low >= bulk_low - OUTLIER * width else bulk_low - width
    air = (high - low) * 0.06
    return low - air, high + air
