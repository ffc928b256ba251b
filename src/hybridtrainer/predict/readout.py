"""Averaged read-out: recent weights averaged for evaluation and for the end, beside the weights that are trained.

At a high learning rate the weights circle around a valley; their average lies in it. The average decides nothing in
training: a run with it has the same weights, bit for bit, as one without. How long a window to average over depends on
the run: `ChosenReadout` has several, and takes the one with the lowest loss on held-out batches, or the last weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.predict.averages import DECAYS, averaged_buffers, averaged_parameters, averages_here
from hybridtrainer.predict.host_average import HostAverage
from hybridtrainer.predict.probe import compare
from hybridtrainer.replicas import is_shard, local, part_of
from hybridtrainer.state import Training
from hybridtrainer.tree import Tree

STRIDES = (4, 16)  # steps from one taken in to the next: a dozen of a window say as much as all, for less work
LIKELY = 0.8  # chance of being better, from which on another choice is read out

Losses = list[list[float]]
"""Of each batch, one or one for each sample."""


class LastReadout:
    """The weights as they are."""

    copies = 0

    def observe(self) -> None:
        """Nothing."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Nothing is swapped."""
        yield

    def state(self) -> Tree:
        """There is none."""
        return None

    def restore(self, state: Tree) -> None:
        """There is nothing to put back."""


class AveragedReadout:
    """A running average of parameters and floating-point buffers, the statistics of batch norms included.

    Args:
        model: Whose weights to average; the average starts with the first ones it observes.
        decay: What the average keeps of itself at each step. It starts as a plain mean, so that the first weights do
            not count for more than the others.

    Attributes:
        copies: How often all weights were copied, for the average or to be put back.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.copies = 0
        self._model = model
        self._decay = decay
        self._parameters = averaged_parameters(model)
        self._average: list[Tensor] = []
        self._observed = 0

    @torch.no_grad()
    def observe(self) -> None:
        """Takes in the present weights."""
        live = self._live()
        if not self._observed:
            self._average = [tensor.clone() for tensor in live]
            self.copies += 1
        else:
            share = max(1 - self._decay, 1 / (self._observed + 1))
            torch._foreach_lerp_(self._average, live, share)
        self._observed += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open the model has the averaged weights; afterwards its own again, bit for bit."""
        if not self._observed:
            yield
            return
        with torch.no_grad():
            live = self._live()
            own = [tensor.clone() for tensor in live]
            self.copies += 1
            torch._foreach_copy_(live, self._average)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, own)

    @property
    def has_observed(self) -> bool:
        """Whether there is an average."""
        return self._observed > 0

    def state(self) -> Tree:
        """Everything, as a tree of live tensors; which of them are parts of sharded weights, where some are."""
        shards = [number for number, tensor in enumerate(self._averaged()) if is_shard(tensor)]
        return {"observed": self._observed, "average": self._average, **({"shards": shards} if shards else {})}

    @torch.no_grad()
    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned."""
        self._observed = state["observed"]
        pairs = zip(state["average"], self._averaged(), strict=False)  # nothing is averaged before the first step
        self._average = [part_of(saved, live).to(live.device, copy=True) for saved, live in pairs]

    def _live(self) -> list[Tensor]:
        return [local(tensor) for tensor in self._averaged()]

    def _averaged(self) -> list[Tensor]:
        return [*self._parameters, *averaged_buffers(self._model)]


class ChosenReadout:
    """Averages over windows of several lengths, of which the best is read out, or the weights as they are.

    Args:
        model: Whose weights to average.
        probe: Losses of the model as it is, on batches that it is not trained on.
        say: Told when another window is chosen.
    """

    def __init__(self, model: nn.Module, probe: Callable[[], Losses], say: Callable[[str], None]) -> None:
        self._model = model
        self._averages = self._new_averages()
        self._probe = probe
        self._say = say
        self._chosen: int | None = None
        self._steps = 0

    def _new_averages(self) -> list[AveragedReadout]:
        return [AveragedReadout(self._model, decay**stride) for decay, stride in zip(DECAYS, STRIDES, strict=True)]

    @property
    def copies(self) -> int:
        """How often all weights were copied."""
        return sum(average.copies for average in self._averages)

    def observe(self) -> None:
        """Takes in the present weights, each average in strides of its own."""
        for average, stride in zip(self._averages, STRIDES, strict=True):
            if not self._steps % stride:
                average.observe()
        self._steps += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open the model has the weights that are best on held-out batches; afterwards its own again."""
        best = self._choose() if self._averages[0].has_observed else None
        with nullcontext() if best is None else self._averages[best].in_place():
            yield

    def _choose(self) -> int | None:
        """The one with the lowest loss, where it is likely to be better than what was read out before."""
        losses: dict[int | None, Losses] = {None: self._probe()}
        for number, average in enumerate(self._averages):
            if average.has_observed:
                with average.in_place():
                    losses[number] = self._probe()
        before = losses[self._chosen if self._chosen in losses else None]
        found = {number: compare(before, each) for number, each in losses.items()}
        best = min(found, key=lambda number: each if math.isfinite(each := found[number].after) else math.inf)
        if best != self._chosen and (found[best].chance_better >= LIKELY or not math.isfinite(found[best].before)):
            what = "the last weights" if best is None else f"an average over about {1 / (1 - DECAYS[best]):.0f} steps"
            own = compare(losses[None], losses[None]).after
            self._say(f"read-out: {what}, held-out loss {found[best].after:.4g}; the last weights have {own:.4g}")
            self._chosen = best
        return self._chosen

    def state(self) -> Tree:
        """Everything, as a tree of live tensors."""
        chosen = -1 if self._chosen is None else self._chosen
        return {"chosen": chosen, "steps": self._steps, "averages": [average.state() for average in self._averages]}

    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned; where another kind of read-out was kept, it begins anew."""
        if not isinstance(state, dict) or "averages" not in state:
            self._chosen, self._steps, self._averages = None, 0, self._new_averages()
            return
        self._chosen, self._steps = None if state["chosen"] < 0 else state["chosen"], state.get("steps", 0)
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.restore(saved)


Readout = LastReadout | AveragedReadout | ChosenReadout | HostAverage


def make_readout(
    training: Training, config: HybridTrainerConfig, probe: Callable[[], Losses] | None, say: Callable[[str], None]
) -> Readout:
    """The read-out that the configuration asks for; "auto" chooses where `predict` is "auto" and there is room.

    Args:
        training: Model and optimizer.
        config: The settings.
        probe: Losses of the model on held-out batches; None where there are none.
        say: Told of what people should know.
    """
    kept = averages_here(training, config, has_probes=probe is not None)
    if not kept.copies:
        return LastReadout()
    if kept.host_bytes:
        return HostAverage(training, config.readout_decay, kept.host_bytes)
    if kept.copies == 1:
        return AveragedReadout(training.model, config.readout_decay)
    assert probe is not None
    return ChosenReadout(training.model, probe, say)
