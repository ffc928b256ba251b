"""Simple forecasts of the loss, many at once: levels, a line, and power laws fitted to several ideas of "recent".

They are what a learned model chooses among, and what it has to beat. This module knows losses and the clock, nothing
of schedules or of how good its forecasts are. A few hundred numbers are too few for torch: numpy takes a tenth of the
time for them, whatever the number of threads.

A target is the mean loss of the `target_window(h)` steps that end h steps ahead.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridtrainer.tree import Tree

Array = NDArray[np.float64]

HORIZONS = (5, 20, 50)
LEVELS = (10, 25)  # steps
LINE = 50  # steps
SHARES = (0.2, 0.3, 0.4, 0.6, 0.8)  # of the clock, that count as recent
FADINGS = (4.0, 8.0)  # or all of it, a step counting by this power of its share of the clock
PURE = (1, 3)  # which of the shares have a power law without a constant too
POWERS = (0.0, 0.25, 0.5, 1.0, 2.0)  # of c + a t^-b; 0 stands for c - a log t
JUDGED_ON = (0.3, 0.4)  # shares of the clock on which all laws are compared for the two mixtures
TEMPER = 0.5  # laws are wrong in their own ways: bins count as half as many
MOST_BINS = 256
NEWEST = 512  # losses kept one by one, so that those of a jump that is rolled back can be taken out again
LEAST_LOSSES = 20

NAMES = (
    *(f"level_{n}" for n in LEVELS),
    f"line_{LINE}",
    *(f"law_{share}" for share in SHARES),
    *(f"fading_{power:.0f}" for power in FADINGS),
    *(f"pure_{SHARES[place]}" for place in PURE),
    *(f"mixture_{share}" for share in JUDGED_ON),
)
TRUST = np.array([0.05 if name.startswith(("level", "line")) else 1.0 for name in NAMES])
"""How much each is believed before a run has shown which is good."""


def target_window(horizon: int) -> int:
    """Over how many steps the loss is averaged that is forecast `horizon` steps ahead: 5, 10 and 25 for 5, 20, 50."""
    return max(5, horizon // 2)


class Experts(NamedTuple):
    """Forecasts of every kind.

    Attributes:
        losses: (horizons, len(NAMES)).
        spread: Standard deviation of single losses around the newest line: the unit in which errors are told.
    """

    losses: Array
    spread: float


class LossCurve:
    """The losses of a run, in bins that grow with it.

    >>> curve = LossCurve()
    >>> for step in range(1, 401):
    ...     curve.add(step, 2 + 3 * step**-0.5)
    >>> losses = curve.experts((50,)).losses[0]
    >>> abs(losses[NAMES.index("mixture_0.4")].item() - (2 + 3 * 438**-0.5)) < 0.001
    True
    """

    def __init__(self) -> None:
        self.clock = 0
        self._width = 1
        self._bins: dict[int, list[float]] = {}  # count, sum of steps, sum of losses, by number
        self._newest: deque[tuple[int, float]] = deque(maxlen=NEWEST)
        self._lowest, self._highest = math.inf, -math.inf

    def add(self, clock: int, loss: float) -> None:
        """Takes in the loss of a real step. A clock that went back undoes what was added after it."""
        while self._newest and self._newest[-1][0] >= clock:
            step, undone = self._newest.pop()
            self._count(step, undone, -1)
        self._newest.append((clock, loss))
        self._count(clock, loss, 1)
        self.clock = clock
        self._lowest, self._highest = min(self._lowest, loss), max(self._highest, loss)

    def mean(self, after: int, until: int) -> float | None:
        """Mean of the losses later than `after` and not later than `until`, if all of these are still known."""
        found = []
        for step, loss in reversed(self._newest):
            if step <= after:
                break
            if step <= until:
                found.append(loss)
        return math.fsum(found) / len(found) if found and self.clock >= until else None

    def experts(self, horizons: tuple[int, ...] = HORIZONS) -> Experts | None:
        """A forecast of every kind for every horizon; None while too few losses are known."""
        if len(self._newest) < LEAST_LOSSES:
            return None
        ahead = _middles(horizons)
        recent = np.array(list(islice(reversed(self._newest), max(LINE, *LEVELS))))[::-1]
        steps, newest = recent[:, 0] - self.clock, recent[:, 1]
        slope, constant, spread = _line(steps[-LINE:], newest[-LINE:])
        with np.errstate(all="ignore"):  # what is not finite is bounded, or no forecast
            laws = self._laws(ahead)
        found = np.concatenate([[[newest[-n:].mean()] * len(ahead) for n in LEVELS], [constant + slope * ahead], laws])
        span = self._highest - self._lowest  # no run goes further than it has come
        return Experts(found.T.clip(max(self._lowest - span, self.floor()), self._highest + span), spread)

    def floor(self) -> float:
        """What the loss cannot be below: a loss that has never been negative will not become so."""
        return 0.0 if self._lowest >= 0 else -math.inf

    def _laws(self, ahead: Array) -> Array:
        """All fitted laws and their mixtures, (kinds, horizons)."""
        held = np.array([sums for sums in self._bins.values() if sums[0] > 0])
        count, share, loss = held[:, 0], held[:, 1] / held[:, 0] / self.clock, held[:, 2] / held[:, 0]
        inside = np.stack([share > 1 - s for s in SHARES] + [share**power for power in FADINGS])
        weights, basis, later = inside * count, _basis(share), _basis(1 + ahead / self.clock)
        laws = _fit(basis, loss, weights)
        pure = _fit(basis[:1], np.log(np.maximum(loss, 1e-12)), weights[list(PURE)])
        values = laws.at(later)  # (weightings, powers, horizons)
        pure_values = np.exp(np.minimum(pure.at(later[:1]), 700.0))
        effective = inside.sum(1) ** 2 / (inside * inside).sum(1)
        single = (_weights(laws.misfit, effective[:, None])[..., None] * values).sum(1)
        curves = np.concatenate([_in_rows(laws.at(basis)), np.exp(_in_rows(pure.at(basis[:1])))])
        all_values = np.concatenate([_in_rows(values), _in_rows(pure_values)])
        squares, mixtures = (curves - loss) ** 2, []
        for judged in JUDGED_ON:
            new = share > 1 - judged
            judges = new * count
            mixtures.append(_weights(squares @ judges / judges.sum(), new.sum()) @ all_values)
        return np.concatenate([single, pure_values[:, 0], mixtures])

    def _count(self, step: int, loss: float, sign: int) -> None:
        sums = self._bins.setdefault((step - 1) // self._width, [0.0, 0.0, 0.0])
        for index, value in enumerate((1, step, loss)):
            sums[index] += sign * value
        if len(self._bins) > MOST_BINS:
            self._width *= 2
            wider: dict[int, list[float]] = {}
            for number, narrow in self._bins.items():
                held = wider.setdefault(number // 2, [0.0, 0.0, 0.0])
                held[:] = [a + b for a, b in zip(held, narrow, strict=True)]
            self._bins = wider

    def state(self) -> dict[str, Tree]:
        """Plain values, for a checkpoint."""
        return {
            "clock": self.clock, "width": self._width, "lowest": self._lowest, "highest": self._highest,
            "bins": [[number, *sums] for number, sums in self._bins.items()],
            "newest": [list(each) for each in self._newest],
        }  # fmt: skip

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned."""
        self.clock, self._width = state["clock"], state["width"]
        self._lowest, self._highest = state["lowest"], state["highest"]
        self._bins = {int(number): list(sums) for number, *sums in state["bins"]}
        self._newest = deque(((int(step), loss) for step, loss in state["newest"]), maxlen=NEWEST)


class _Laws(NamedTuple):
    """Fitted curves c + a f, one for each weighting and basis function, each (weightings, functions)."""

    constant: Array
    factor: Array
    misfit: Array

    def at(self, basis: Array) -> Array:
        """Their values where the functions have these, (weightings, functions, places)."""
        return self.constant[..., None] + self.factor[..., None] * basis


@lru_cache(maxsize=4)
def _middles(horizons: tuple[int, ...]) -> Array:
    """How far ahead the middle of each target is."""
    return np.array([h - (target_window(h) - 1) / 2 for h in horizons])


def _in_rows(values: Array) -> Array:
    return values.reshape(-1, values.shape[-1])


def _basis(share: Array) -> Array:
    """What each law says of a step at this share of the clock, (powers, places)."""
    return np.stack([np.log(share) if power == 0 else share**-power for power in POWERS])


def _fit(basis: Array, values: Array, weights: Array) -> _Laws:
    """Weighted least squares of c + a f, for every weighting (rows of `weights`) and every function of the basis."""
    shares = weights / weights.sum(1, keepdims=True)
    middle, level = shares @ basis.T, (shares @ values)[:, None]
    both = shares @ (basis * values).T - middle * level
    variance = shares @ (basis * basis).T - middle**2
    factor = both / np.maximum(variance, 1e-12)
    misfit = (shares @ (values * values))[:, None] - level**2 - factor * both
    return _Laws(level - factor * middle, factor, np.maximum(misfit, 1e-12 * (1 + level**2)))


def _weights(misfit: Array, bins: Array) -> Array:
    """How much curves count that miss so much in so many bins, along the last dimension."""
    misfit = np.maximum(misfit, 1e-24)
    weights = (misfit.min(-1, keepdims=True) / misfit) ** (TEMPER * bins / 2)
    shares: Array = weights / weights.sum(-1, keepdims=True)
    return shares


def _line(steps: Array, values: Array) -> tuple[float, float, float]:
    """Slope, value at 0 and standard deviation around it of the line that fits best."""
    middle, level = float(steps.mean()), float(values.mean())
    centred = steps - middle
    slope = float(centred @ values / (centred @ centred))
    constant = level - slope * middle
    rest = values - constant - slope * steps
    return slope, constant, max(math.sqrt(rest @ rest / len(rest)), 1e-3 * abs(level), 1e-12)
