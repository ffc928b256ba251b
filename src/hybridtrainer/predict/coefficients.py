"""Coefficients of the directions, learned group by group from what really happened.

A jump goes along the drift of the windows, their change of velocity (acceleration) and the optimizer's momentum, each
as far as it alone would go in the time ahead, times a coefficient. After every window it is known how far each should
have gone before it: that is a least-squares problem in three unknowns, of which all that is needed are inner products.
Its normal equations are added up with fading weights, and begin as if two windows had shown that the drift goes on and
nothing else counts. Where windows are mostly noise the drift's coefficient so becomes as small as it should be.

This module sees inner products and learning-rate times, never a weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtrainer.predict import directions
from hybridtrainer.predict.baselines import Forecast, Past, confidence
from hybridtrainer.tree import Tree

NAME = "learned"
DIRECTIONS = ("drift", "acceleration", "momentum")
PRIOR = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
PRIOR_WINDOWS = 2.0  # as many windows as would have to speak against the prior to outweigh it
MEMORY = 0.95  # what a window still counts when the next one is there
LEAST_WINDOWS = 3  # to learn from: two to forecast from, and the one that came


class Fit(NamedTuple):
    """How a forecast of the newest window compares with it, in squared lengths of that window, over all groups.

    Attributes:
        along: Inner product of forecast and window.
        length: Squared length of the forecast.
    """

    along: float
    length: float

    @property
    def error(self) -> float:
        """Squared error; 1 is that of a forecast that nothing moves."""
        return 1 - 2 * self.along + self.length


class Coefficients:
    """What one run has shown so far.

    Args:
        groups: How many groups of weights there are.

    >>> from hybridtrainer.predict.baselines import Past
    >>> windows = torch.eye(4, dtype=torch.float64)[None]  # four that have nothing in common
    >>> past = Past(windows, torch.ones(1, 4, dtype=torch.float64))
    >>> learned = Coefficients(groups=1)
    >>> for _ in range(20):
    ...     fit = learned.learn(past, torch.zeros(1, 5, dtype=torch.float64))
    >>> learned.values(past, torch.zeros(1, 5, dtype=torch.float64), torch.ones(1))[0, 0] < 0.2
    tensor(True)
    """

    def __init__(self, groups: int) -> None:
        count = len(DIRECTIONS)
        self._normal = torch.zeros(groups, count, count, dtype=torch.float64)
        self._right = torch.zeros(groups, count, dtype=torch.float64)

    def learn(self, past: Past, momentum: Tensor) -> Fit | None:
        """Takes in the newest window. Returns how well it would have been forecast, None where nobody could have.

        Args:
            past: All windows; the newest is what came.
            momentum: Inner products of the momentum that the newest window began with: with all windows, and with
                itself, (groups, windows + 1).
        """
        if past.windows < LEAST_WINDOWS:
            return None
        came = past.windows - 1
        before = Past(past.gram[:, :came, :came], past.tau[:, :came])
        own = torch.cat([momentum[:, :came], momentum[:, -1:]], dim=1)
        said = self.values(before, own, past.tau[:, came])
        along = length = whole = 0.0
        for group in range(len(past.gram)):
            size = float(past.gram[group, came, came])
            if not size > 0:
                continue
            moves = _moves(before.tau[group], past.tau[group, came])
            with_came = torch.cat([past.gram[group, :came, came], momentum[group, came : came + 1]])
            normal, right = moves @ _extended(before, own, group) @ moves.T, moves @ with_came
            along += float(said[group] @ right)
            length += float(said[group] @ normal @ said[group])
            whole += size
            self._normal[group] = MEMORY * self._normal[group] + normal / size
            self._right[group] = MEMORY * self._right[group] + right / size
        return Fit(along / whole, length / whole) if whole else None

    def values(self, past: Past, momentum: Tensor, ahead: Tensor) -> Tensor:
        """The coefficients of each group for the time ahead, (groups, directions).

        Args:
            past: All windows.
            momentum: Inner products of the present momentum with all windows and itself, (groups, windows + 1).
            ahead: Learning-rate time of each group, (groups,).
        """
        found = []
        for group, (normal, right) in enumerate(zip(self._normal, self._right, strict=True)):
            moves = _moves(past.tau[group], ahead[group])
            sizes = (moves @ _extended(past, momentum, group) @ moves.T).diagonal()
            newest = past.gram[group, -1, -1] * (ahead[group] / past.tau[group, -1]) ** 2
            prior = PRIOR_WINDOWS * sizes / newest.clamp(min=1e-300)
            prior = torch.where(sizes > 0, prior, 1.0)  # a direction of no length: its coefficient does not matter
            found.append(torch.linalg.solve(normal + prior.diag(), right + prior * PRIOR))
        return torch.stack(found)

    def forecast(
        self,
        past: Past,
        momentum: Tensor,
        horizon_steps: int,
        ahead: Tensor,
        trust_radius: float,
        gain: float = 1.0,
    ) -> Forecast:
        """What is expected of the next `horizon_steps`.

        Args:
            past: All windows.
            momentum: As in `values`.
            horizon_steps: How far to look.
            ahead: Learning-rate time of those steps for each group, (groups,).
            trust_radius: Longest displacement of a group, relative to that of its newest window.
            gain: A factor of all coefficients.
        """
        values = gain * self.values(past, momentum, ahead)
        rows = torch.zeros(len(values), past.windows + 1, dtype=torch.float64)
        squares = newest = 0.0
        for group, chosen in enumerate(values):
            row = chosen @ _moves(past.tau[group], ahead[group])
            square = max(float(row @ _extended(past, momentum, group) @ row), 0.0)
            window = float(past.gram[group, -1, -1])
            scale = min(1.0, trust_radius * (window / square) ** 0.5) if square > 0 else 0.0
            rows[group] = scale * row
            squares += scale**2 * square
            newest += window * float(ahead[group] / past.tau[group, -1]) ** 2
        return Forecast(
            forecaster=NAME,
            horizon_steps=horizon_steps,
            coefficients=rows[:, :-1],
            denoise=torch.stack([directions.denoise(tau) for tau in past.tau]),
            momentum_time=rows[:, -1] if bool(rows[:, -1].any()) else None,
            confidence=confidence(past, rows[:, :-1]),
            norm_ratio=(squares / newest) ** 0.5 if newest > 0 else 0.0,
        )

    def state(self) -> dict[str, Tree]:
        """For a checkpoint."""
        return {"normal": self._normal, "right": self._right}

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned."""
        self._normal.copy_(state["normal"])
        self._right.copy_(state["right"])


def _moves(tau: Tensor, ahead: Tensor) -> Tensor:
    """How far each direction alone would go, over the windows and the momentum: (directions, windows + 1)."""
    moves = torch.zeros(len(DIRECTIONS), len(tau) + 1, dtype=torch.float64)
    moves[0, :-1] = directions.drift(tau) * ahead
    moves[1, :-1] = directions.acceleration(tau) * (tau.sum() / 2) * ahead
    moves[2, -1] = ahead
    return moves


def _extended(past: Past, momentum: Tensor, group: int) -> Tensor:
    """Inner products of the windows and the momentum, (windows + 1, windows + 1)."""
    whole = torch.zeros(past.windows + 1, past.windows + 1, dtype=torch.float64)
    whole[:-1, :-1] = past.gram[group]
    whole[-1, :] = whole[:, -1] = momentum[group]
    return whole
