"""Which horizon pays, learned from how jumps of each have fared: LinUCB (Li et al., arXiv 1003.0146). Pure.

The arms are shares of the longest jump allowed, and not to jump at all, which is worth 0. A jump is paid with the
steps it was credited with less what it cost in steps (probes, snapshot, and where it was rolled back everything that
was lost), in units of that cost: so the payment is progress per second against plain steps, and depends on no clock.
Each arm's payment is taken to be linear in the context; the arm with the highest upper bound is chosen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SHARES = (0.25, 0.5, 1.0)
CONTEXT = 3
OPTIMISM = 1.0  # standard errors by which an arm may be better than it has shown
CURIOSITY = 0.1  # by how much that grows with the logarithm of the run's length, so that nothing is given up for ever
HOPE = 6.0  # costs that the longest jump is hoped to pay, and shorter ones in proportion, before any has been tried
LARGEST = 10.0  # costs that one jump is paid at most

Vector = tuple[float, ...]


class Arm(NamedTuple):
    """What is known of one horizon.

    Attributes:
        inverse: Of the sum of x x' over all jumps, and 1 on the diagonal.
        paid: The sum of payment times x, and what was hoped for.
    """

    inverse: tuple[Vector, ...]
    paid: Vector


Arms = tuple[Arm, ...]

_UNIT = tuple(tuple(float(i == j) for j in range(CONTEXT)) for i in range(CONTEXT))
NOTHING_KNOWN: Arms = tuple(Arm(_UNIT, (share * HOPE, *(0.0,) * (CONTEXT - 1))) for share in SHARES)


def context(real_steps: int, jumps_kept: int, jumps_failed: int) -> Vector:
    """What the payment may depend on: how far the run is, and how jumps have fared.

    >>> context(0, 0, 0)
    (1.0, 0.0, 0.5)
    """
    return (1.0, math.log1p(real_steps) / 10, (jumps_kept + 1) / (jumps_kept + jumps_failed + 2))


def choose(arms: Arms, x: Vector, real_steps: int) -> int | None:
    """The arm to play, the shortest of equals; None where not to jump promises more."""
    optimism = OPTIMISM + CURIOSITY * math.log1p(real_steps)
    best, choice = 0.0, None
    for number, arm in enumerate(arms):
        spread = _times(arm.inverse, x)
        bound = _dot(_times(arm.inverse, arm.paid), x) + optimism * math.sqrt(max(0.0, _dot(spread, x)))
        if bound > best:
            best, choice = bound, number
    return choice


def learn(arms: Arms, number: int, x: Vector, payment: float, again: bool = False) -> Arms:
    """Takes in what a jump was paid; `again` where the same jump has been paid before, and this is a correction."""
    arm = arms[number]
    inverse = arm.inverse
    if not again:  # Sherman and Morrison
        spread = _times(inverse, x)
        below = 1 + _dot(spread, x)
        inverse = tuple(
            tuple(value - spread[i] * spread[j] / below for j, value in enumerate(row)) for i, row in enumerate(inverse)
        )
    bounded = max(-LARGEST, min(LARGEST, payment))
    paid = tuple(known + bounded * each for known, each in zip(arm.paid, x, strict=True))
    return (*arms[:number], Arm(inverse, paid), *arms[number + 1 :])


def _dot(one: Vector, other: Vector) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def _times(matrix: tuple[Vector, ...], vector: Vector) -> Vector:
    return tuple(_dot(row, vector) for row in matrix)
