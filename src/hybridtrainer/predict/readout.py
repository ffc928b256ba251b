"""Averaged read-out: recent weights averaged for evaluation and for the end, beside the weights that are trained.

At a high learning rate the weights circle around a valley; their average lies in it. The average decides nothing in
training: a run with it has the same weights, bit for bit, as one without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.replicas import is_shard, local, part_of
from hybridtrainer.tree import Tree


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
        buffers = (buffer for buffer in self._model.buffers() if buffer.is_floating_point())
        parameters = (parameter for parameter in self._model.parameters() if parameter.is_floating_point())
        return [*parameters, *buffers]


def make_readout(model: nn.Module, config: HybridTrainerConfig) -> LastReadout | AveragedReadout:
    """The read-out that the configuration asks for."""
    return AveragedReadout(model, config.readout_decay) if config.readout == "averaged" else LastReadout()
