"""Sample forecasts: what a model already knows is seldom computed, neither forward nor backward.

A ledger has for each sample the loss that was seen last. That is the forecast of its loss now, and the longer ago it
was, the more it goes back to the mean of all: what was foreseen for long is looked at again. A sample is computed with
a chance that grows with its forecast and ends at 1, so that what is known is skipped rather than what is hard chased:
where most is hard, half of what losses were when training began is enough for 1. A sample that is worse off than
samples were when training began, as one with a wrong label is, counts like any.
How much is skipped depends on how much the losses differ: where all are alike, nearly all are computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hybridtrainer.tree import Tree

SURE = 5.2  # times the mean loss: from there on a sample is always computed, if not sooner
RARE = 0.01  # the share of samples with the highest losses: as high is always computed too
KNOWN = 0.1  # of the mean loss when training began: below it a sample is known
LEAST_KNOWN = 1 / 3  # of the samples: while fewer are known, what is left out is not known either
UNKNOWN = 0.5  # of the mean loss when training began: while fewer are known, as high is always computed too
BASE = 0.3  # of the mean loss, added to each forecast
LEAST = 0.01  # chance of any sample: none is ever left for good
FADING_EPOCHS = 16.0  # of computed samples, after which a forecast has gone back to the mean by 63%
EARLY = 1024  # losses that say what was usual when training began
SKETCH = 1 << 16  # samples whose losses stand for all, to know the mean and what is rare


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
        self._early = torch.empty(0)  # the first losses of all
        self._first: tuple[float, float] | None = None  # their mean, and above what one is worse; None till all are in
        self._scale: _Scale | None = None  # by what losses are measured; None when something was learned since
        self._waiting: list[tuple[Tensor, Tensor, float]] = []

    def learn(self, indices: Tensor, losses: Tensor) -> None:
        """Takes note of losses, which may still be computed: nobody waits for them before they are needed.

        Args:
            indices: Which samples.
            losses: One for each, on any device.
        """
        self.computed += indices.numel()
        self._waiting.append((indices, losses.detach(), self.computed / self.samples))

    def chances(self, indices: Tensor) -> Tensor:
        """The chance of each sample to be computed."""
        self._settle()
        if self._scale is None:
            self._scale = self._measure()
        scale, losses = self._scale, self._losses.index_select(0, indices).double()
        age = self.computed / self.samples - self._seen_at.index_select(0, indices)
        fading = age.div_(-FADING_EPOCHS).exp_()
        chances = scale.chance((losses - scale.mean).mul_(fading).add_(scale.mean))
        chances = torch.where(losses > scale.worst, chances.clamp(max=scale.usual), chances)
        return chances.nan_to_num_(1.0)  # nothing is known of them

    def known_share(self) -> float:
        """Of all samples, those whose loss was seen to be a small part of what losses were when training began.

        >>> ledger = Ledger(2)
        >>> ledger.learn(torch.arange(2), torch.tensor([4.0, 2.0]))
        >>> ledger.learn(torch.arange(2), torch.tensor([0.2, 0.4]))
        >>> ledger.known_share()
        0.5
        """
        self._settle()
        return 0.0 if self._first is None else self._share_known(self._seen(), self._first[0])

    def _share_known(self, seen: Tensor, first: float) -> float:
        lowest = min(0.0, float(seen.amin())) if len(seen) else 0.0
        known = (seen < _between(lowest, first, KNOWN)).count_nonzero()  # of nothing seen nothing is known
        return int(known) / -(-self.samples // self._stride)

    @property
    def _stride(self) -> int:
        """From one of the samples whose losses stand for all to the next."""
        return -(-self.samples // SKETCH)

    def _seen(self) -> Tensor:
        """Losses that stand for all, as far as any were seen."""
        sketch = self._losses[:: self._stride].double()
        return sketch[~sketch.isnan()] if math.isnan(float(sketch.mean())) else sketch

    def _measure(self) -> _Scale:
        known = self._seen()
        if not len(known):
            return _Scale(0.0, 0.0, 0.0)
        first, worst = self._first or (math.nan, math.inf)
        usual = known.clamp(max=worst)  # one sample beyond all measure must not hide the others
        lowest, mean = min(0.0, float(usual.amin())), float(usual.mean())
        mostly_hard = math.isfinite(worst) and self._share_known(known, first) < LEAST_KNOWN
        unknown = _between(lowest, first, UNKNOWN) if mostly_hard else math.inf
        sure = max(mean, min(SURE * (mean - lowest) + lowest, _highest(usual), unknown))
        scale = _Scale(mean, BASE * (mean - lowest) - lowest, sure, worst)
        return replace(scale, usual=float(scale.chance(known).mean()))

    def state(self) -> Tree:
        """Everything, as a tree of live tensors."""
        self._settle()
        seen = {"losses": self._losses, "seen_at": self._seen_at}
        return {**seen, "early": self._early, "computed": self.computed}

    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned."""
        self._waiting, self._scale = [], None
        self._losses, self._seen_at = state["losses"].clone(), state["seen_at"].clone()
        self._early, self.computed = state["early"].clone(), state["computed"]
        self._first = self._find_first()

    def _settle(self) -> None:
        """Writes down what waits; it comes from the device in one go, since each copy would wait for it."""
        if not self._waiting:
            return
        lengths = [indices.numel() for indices, _, _ in self._waiting]
        indices = torch.cat([each for each, _, _ in self._waiting]).numpy()
        losses = torch.cat([each for _, each, _ in self._waiting]).to("cpu", torch.float32).numpy()
        epochs = np.repeat(np.array([epoch for _, _, epoch in self._waiting], dtype=np.float32), lengths)
        usable = np.isfinite(losses)
        if not usable.all():
            indices, losses, epochs = indices[usable], losses[usable], epochs[usable]
        # Of a sample that came twice numpy keeps what came last; torch does not say.
        self._losses.numpy()[indices] = losses
        self._seen_at.numpy()[indices] = epochs
        if self._first is None:
            room = min(EARLY, self.samples) - len(self._early)
            self._early = torch.cat([self._early, torch.from_numpy(losses[:room])])
            self._first = self._find_first()
        self._waiting, self._scale = [], None

    def _find_first(self) -> tuple[float, float] | None:
        is_whole = len(self._early) == min(EARLY, self.samples)
        return (float(self._early.double().mean()), _highest(self._early)) if is_whole else None


@dataclass(frozen=True)
class _Scale:
    """By what losses are measured.

    Attributes:
        mean: Of all losses.
        base: What is added to each, so that none is too small for a chance.
        sure: From which loss on a sample is always computed.
        worst: Above which a loss is worse than losses were when training began.
        usual: The mean chance.
    """

    mean: float
    base: float
    sure: float
    worst: float = math.inf
    usual: float = 1.0

    def chance(self, losses: Tensor) -> Tensor:
        """Certainty where there is nothing to measure by: all losses are 0, or one and the same below it."""
        whole = self.sure + self.base
        if not (math.isfinite(whole) and whole > 0):
            return torch.ones_like(losses)
        return (losses + self.base).div_(whole).clamp_(LEAST, 1)


def _between(lowest: float, first: float, share: float) -> float:
    """A share of the mean loss when training began, counted from the lowest."""
    return share * (first - lowest) + lowest


def _highest(losses: Tensor) -> float:
    """The loss that only the highest hundredth exceeds."""
    place = len(losses) - int(RARE * len(losses)) - 1
    return float(np.partition(losses.numpy(), place)[place])  # torch's kthvalue takes up to ten times as long
