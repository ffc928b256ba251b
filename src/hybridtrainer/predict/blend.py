"""Which of many forecasts to believe: each counts by how it has done in this run.

It knows numbers of experts and their errors, not what they are. Errors at one horizon say something about the others
too: far forecasts are judged late, and until then by what near ones have shown.
"""

from __future__ import annotations

import numpy as np
import torch

from hybridtrainer.predict.curves import Array
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

    >>> blend = Blend(np.ones(2), horizons=1)
    >>> for _ in range(50):
    ...     blend.learn(0, np.array([1.0, 2.0]), came=1.1)
    >>> bool(blend.weights()[0, 0] > 0.99)
    True
    """

    def __init__(self, trust: Array, horizons: int, sharpness: float = 1.5) -> None:
        self._sharpness = sharpness
        self._trust = np.log(trust / trust.sum())
        self._sums = np.zeros((horizons, len(trust)))  # of relative errors
        self._counts = np.zeros(horizons)
        apart = np.arange(horizons)
        self._pooling = POOLING ** np.abs(apart[:, None] - apart)

    def learn(self, horizon: int, forecasts: Array, came: float) -> None:
        """Takes in what each expert had said at one horizon, and what came."""
        errors = np.abs(forecasts - came)
        median = np.partition(errors, (len(errors) - 1) // 2)[(len(errors) - 1) // 2]  # the lower of two
        self._sums[horizon] *= FORGETTING
        self._sums[horizon] += np.minimum(errors / max(median, 1e-12), LARGEST)
        self._counts[horizon] = FORGETTING * self._counts[horizon] + 1

    def weights(self) -> Array:
        """What each counts now, (horizons, experts); rows add up to 1."""
        relative = np.log((self._sums + PRIOR_ERRORS) / (self._counts + PRIOR_ERRORS)[:, None])
        counts = self._pooling * self._counts
        total = counts.sum(1, keepdims=True)
        pooled = counts @ relative / np.maximum(total, 1e-12)
        return softmax(self._trust - self._sharpness * np.sqrt(total) * pooled)

    def state(self) -> dict[str, Tree]:
        """Live tensors, for a checkpoint."""
        return {"sums": torch.from_numpy(self._sums), "counts": torch.from_numpy(self._counts)}

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned."""
        self._sums[:] = state["sums"].numpy()
        self._counts[:] = state["counts"].numpy()


def softmax(values: Array) -> Array:
    """Along the last dimension."""
    raised = np.exp(values - values.max(-1, keepdims=True))
    shares: Array = raised / raised.sum(-1, keepdims=True)
    return shares
