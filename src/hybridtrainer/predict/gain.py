"""How far the next jump should go of what its coefficients say: what the dynamics model says of it, if it is believed.

At the start of every window the model says a factor; when the window has come it is known how wrong the forecast of
its displacement would have been with that factor and without. The factor is used while it has been better. This module
decides nothing else and knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridtrainer.predict.coefficients import Fit
from hybridtrainer.tree import Tree

LEAST_WINDOWS = 4  # that must have been judged
MEMORY = 0.9  # what an error still counts when the next one is there


class Gain:
    """Follows one run.

    >>> gain = Gain()
    >>> for _ in range(6):
    ...     gain.say(math.log(0.5))
    ...     gain.judge(Fit(along=0.1, length=0.2))  # half as far would have been right
    >>> gain.say(math.log(0.5)); round(gain.factor(), 3)
    0.5
    """

    def __init__(self) -> None:
        self._said = 0.0  # logarithm of the factor, for the window that is open
        self._errors = [0.0, 0.0]  # without the factor and with it
        self._judged = 0

    def say(self, logarithm: float) -> None:
        """Takes in what the model says at the start of a window."""
        self._said = logarithm

    def judge(self, fit: Fit) -> None:
        """Takes in what came of the window."""
        factor = math.exp(self._said)
        found = (fit.error, Fit(factor * fit.along, factor**2 * fit.length).error)
        self._errors = [MEMORY * known + error for known, error in zip(self._errors, found, strict=True)]
        self._judged += 1

    def factor(self) -> float:
        """What to multiply the next jump by; 1 where the model is not believed."""
        without, with_it = self._errors
        return math.exp(self._said) if self._judged >= LEAST_WINDOWS and with_it < without else 1.0

    def state(self) -> Tree:
        """For a checkpoint."""
        return [self._said, list(self._errors), self._judged]

    def restore(self, state: Sequence[Tree]) -> None:
        """Goes back to what `state` returned."""
        self._said, self._errors, self._judged = state[0], list(state[1]), state[2]
