"""Judging a jump: losses on the same batches at two places in weight space, compared pair by pair.

Batches with one scalar loss give one pair each; batches with one loss for each sample as many pairs as samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, stdev


@dataclass(frozen=True)
class Comparison:
    """Losses before and after, and how sure it is that after is lower.

    Attributes:
        before: Mean loss at the first place.
        after: Mean loss at the second.
        chance_better: Chance that the true difference is negative, given the pairs seen; 0 where any of them is
            not finite. A single pair knows no spread: its sign alone decides.
        error: Standard error of the loss before; infinite where a single one is known, or one is not finite.
    """

    before: float
    after: float
    chance_better: float
    error: float = math.inf

    @property
    def gain(self) -> float:
        """How much lower the loss is after."""
        return self.before - self.after


def compare(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> Comparison:
    """Paired comparison of two measurements of the same batches.

    >>> compare([[2.0], [3.0], [2.5]], [[1.9], [2.8], [2.4]]).chance_better > 0.99
    True
    """
    first = [value for batch in before for value in batch]
    second = [value for batch in after for value in batch]
    differences = [b - a for a, b in zip(first, second, strict=True)]
    mean = _mean(differences)
    if not all(map(math.isfinite, (*first, *second, mean))):
        chance = 0.0
    elif len(differences) < 2 or (error := stdev(differences) / math.sqrt(len(differences))) == 0:
        chance = 1.0 if mean < 0 else 0.0
    else:
        chance = NormalDist().cdf(-mean / error)
    known = len(first) > 1 and all(map(math.isfinite, first))
    return Comparison(_mean(first), _mean(second), chance, stdev(first) / math.sqrt(len(first)) if known else math.inf)


def _mean(values: Sequence[float]) -> float:
    """The mean of values of any size; NaN and infinities give one of themselves, not an error."""
    return sum(value / len(values) for value in values)
