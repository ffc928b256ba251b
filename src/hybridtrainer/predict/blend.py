"""Which of many forecasts to believe: each counts by how it has done in this run.

It knows numbers of experts and their errors, not what they are. Errors at one horizon say something about the others
too: far forecasts are judged late, and until then by what near ones have shown.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrainer.tree import Tree

FORGETTING = 0.97  # by each error that becomes known
POOLING = 0.7  # what errors count one horizon away; twice away its square
PRIOR_ERRORS = 5.0  # errors in which all are assumed to have done alike
LARGEST = 4.0  # median errors that one error counts at most


class Blend:
    """Weights of experts at several horizons.

    Args:
        trust: What each expert counts before anything is known, positive.
        horizons: How many.
        sharpness: How fast the better ones win: a weight falls with this power of the relative error, times the root
            of how many errors are known.

    >>> blend = Blend(torch.ones(2, dtype=torch.float64), horizons=1)
    >>> for _ in range(50):
    ...     blend.learn(0, torch.tensor([1.0, 2.0], dtype=torch.float64), came=1.1)
    >>> blend.weights()[0, 0].item() > 0.99
    True
    """

    def __init__(self, trust: Tensor, horizons: int, sharpness: float = 1.5) -> None:
        self._sharpness = sharpness
        self._trust = (trust / trust.sum()).log()
        self._sums = torch.zeros(horizons, len(trust), dtype=torch.float64)  # of relative errors
        self._counts = torch.zeros(horizons, dtype=torch.float64)
        apart = torch.arange(horizons)
        self._pooling = POOLING ** (apart[:, None] - apart[None, :]).abs().double()

    def learn(self, horizon: int, forecasts: Tensor, came: float) -> None:
        """Takes in what each expert had said at one horizon, and what came."""
        errors = (forecasts - came).abs()
        relative = (errors / errors.median().clamp(min=1e-12)).clamp(max=LARGEST)
        self._sums[horizon] = FORGETTING * self._sums[horizon] + relative
        self._counts[horizon] = FORGETTING * self._counts[horizon] + 1

    def weights(self) -> Tensor:
        """What each counts now, (horizons, experts); rows add up to 1."""
        relative = ((self._sums + PRIOR_ERRORS) / (self._counts + PRIOR_ERRORS)[:, None]).log()
        counts = self._pooling * self._counts
        total = counts.sum(1, keepdim=True)
        pooled = counts @ relative / total.clamp(min=1e-12)
        return torch.softmax(self._trust - self._sharpness * total.sqrt() * pooled, dim=1)

    def state(self) -> dict[str, Tree]:
        """Live tensors, for a checkpoint."""
        return {"sums": self._sums, "counts": self._counts}

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned."""
        self._sums.copy_(state["sums"])
        self._counts.copy_(state["counts"])
