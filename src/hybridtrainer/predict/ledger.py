"""Sample forecasts: what a model already knows is seldom computed, neither forward nor backward.

A ledger has for each sample the loss that was seen last. That is the forecast of its loss now, and the longer ago it
was, the more it goes back to the mean of all: what was foreseen for long is looked at again. A sample is computed with
a chance that grows with its forecast. It ends at 1, so that what is known is skipped rather than what is hard chased;
and a sample that is worse off than samples were when training began, as one with a wrong label is, counts like any.
How much is skipped depends on how much the losses differ: where all are alike, nearly all are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridtrainer.tree import Tree

SURE = 5.2  # times the mean loss: from there on a sample is always computed, if not sooner
RARE = 0.01  # the share of samples with the highest losses: as high is always computed too
BASE = 0.3  # of the mean loss, added to each forecast: no sample is ever left for good
FADING_EPOCHS = 16.0  # of computed samples, after which a forecast has gone back to the mean by 63%
SKETCH = 1 << 16  # samples whose losses stand for all, to know the mean and what is rare
TINY = 1e-12


class Ledger:
    """What is known of each sample of a data set, in 8 bytes each.

    Args:
        samples: How many there are.

    Attributes:
        samples: How many there are.
        computed: How many losses it has been told, a sample that came twice counting twice.

    >>> ledger = Ledger(4)
    >>> ledger.learn(torch.arange(3), torch.tensor([2.0, 2.0, 2.0]))
    >>> ledger.learn(torch.arange(3), torch.tensor([0.0, 0.1, 1.9]))
    >>> [round(float(chance), 2) for chance in ledger.chances(torch.arange(4))]
    [0.1, 0.14, 1.0, 1.0]
    """

    def __init__(self, samples: int) -> None:
        self.computed, self.samples = 0, samples
        self._losses = torch.full((samples,), torch.nan)
        self._seen_at = torch.zeros(samples)  # in epochs of computed samples
        self._first: float | None = None  # mean loss of the first batch
        self._waiting: list[tuple[Tensor, Tensor, float]] = []

    def learn(self, indices: Tensor, losses: Tensor) -> None:
        """Takes note of losses, which may still be computed: nobody waits for them before they are needed.

        Args:
            indices: Which samples.
            losses: One for each, on any device.
        """
        self.computed += len(indices)
        self._waiting.append((indices.long(), losses.detach(), self.computed / self.samples))

    def chances(self, indices: Tensor) -> Tensor:
        """The chance of each sample to be computed."""
        self._settle()
        scale = self._scale()
        if scale is None:
            return torch.ones(len(indices))
        losses = self._losses[indices]
        age = self.computed / self.samples - self._seen_at[indices]
        forecasts = scale.mean + (losses - scale.mean) * torch.exp(-age / FADING_EPOCHS)
        chances = scale.chance(forecasts)
        assert self._first is not None
        chances = torch.where(losses > self._first, chances.clamp(max=scale.usual), chances)
        return torch.where(losses.isnan(), torch.ones_like(chances), chances)

    def _scale(self) -> _Scale | None:
        """By what losses are measured now; None while none is known."""
        known = self._losses[:: -(-self.samples // SKETCH)]
        known = known[~known.isnan()]
        if not len(known):
            return None
        lowest, mean = min(0.0, float(known.min())), float(known.mean())
        rare = float(known.kthvalue(len(known) - int(RARE * len(known))).values)
        scale = _Scale(mean, BASE * (mean - lowest) - lowest, max(mean, min(SURE * (mean - lowest) + lowest, rare)))
        return replace(scale, usual=float(scale.chance(known).mean()))

    def state(self) -> Tree:
        """Everything, as a tree of live tensors."""
        self._settle()
        seen = {"losses": self._losses, "seen_at": self._seen_at}
        return {**seen, "first": self._first, "computed": self.computed}

    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned."""
        self._waiting = []
        self._losses, self._seen_at = state["losses"].clone(), state["seen_at"].clone()
        self._first, self.computed = state["first"], state["computed"]

    def _settle(self) -> None:
        for indices, losses, epoch in self._waiting:
            values = losses.to("cpu", torch.float32)
            usable = values.isfinite()
            self._losses[indices[usable]] = values[usable]
            self._seen_at[indices[usable]] = epoch
            if self._first is None and bool(usable.any()):
                self._first = float(values[usable].mean())
        self._waiting = []


@dataclass(frozen=True)
class _Scale:
    """By what losses are measured.

    Attributes:
        mean: Of all losses.
        base: What is added to each, so that none is too small for a chance.
        sure: From which loss on a sample is always computed.
        usual: The mean chance.
    """

    mean: float
    base: float
    sure: float
    usual: float = 1.0

    def chance(self, losses: Tensor) -> Tensor:
        return ((losses + self.base) / (self.sure + self.base + TINY)).clamp(0, 1)
