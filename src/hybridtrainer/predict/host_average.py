"""Averaged read-out of a streamed model: the average is in host memory, where the weights are, and takes none of a GPU.

Bringing all weights home takes as long as a step where the link binds, so that it is done every few steps only; what
is averaged is the weights of those steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor, nn

from hybridtrainer.errors import MemoryBudgetError
from hybridtrainer.sizes import as_size
from hybridtrainer.state import Streamed, Training, restore_parameters
from hybridtrainer.tree import Tree

EVERY = 16  # steps between weights that are averaged
ELEMENTS = 1 << 24  # of a parameter that are read at a time


class HostAverage:
    """A running average of a streamed model's parameters, in fp32.

    Args:
        training: The model and its own optimizer.
        decay: What the average keeps of itself at each step; of the steps between two that are averaged as well.
        needed_bytes: Of host memory, as `averages_of` counts them.

    Attributes:
        copies: How often all weights were copied, for the average or to be put back.

    Raises:
        MemoryBudgetError: if host memory has no room for it.
    """

    choosing_seconds = 0.0

    def __init__(self, training: Training, decay: float, needed_bytes: int) -> None:
        self.copies = 0
        self._training = training
        self._decay = decay**EVERY
        self._average: dict[str, Tensor] = {}
        self._steps = self._observed = 0
        self._is_open = False
        available = psutil.virtual_memory().available
        if needed_bytes > available:
            raise MemoryBudgetError(
                f'An averaged read-out of this streamed model takes {as_size(needed_bytes)} of host memory, and '
                f"{as_size(available)} are available.",
                'Set readout = "last".',
            )  # fmt: skip

    @torch.no_grad()
    def observe(self) -> None:
        """Counts a step, and takes in the weights of every few."""
        self._steps += 1
        if (self._steps - 1) % EVERY:
            return
        share = max(1 - self._decay, 1 / (self._observed + 1))
        for name, parameter in self._training.model.named_parameters():
            if parameter.requires_grad:
                self._take_in(name, parameter, share)
        self._observed += 1
        self.copies += 1

    def _take_in(self, name: str, parameter: nn.Parameter, share: float) -> None:
        if name not in self._average:
            self._average[name] = torch.empty(parameter.numel(), dtype=torch.float32)
        for start in range(0, parameter.numel(), ELEMENTS):
            stop = min(start + ELEMENTS, parameter.numel())
            mine, values = self._average[name][start:stop], parameter.home.read(start, stop)  # type: ignore[attr-defined]
            if self._observed:
                mine.lerp_(values.to("cpu", torch.float32), share)
            else:
                mine.copy_(values)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open the model has the averaged weights; afterwards its own again, bit for bit."""
        if not self._observed or self._is_open:
            yield
            return
        own, self._is_open = self._own(), True
        self.copies += 1
        try:
            with torch.no_grad():
                for name, average in self._average.items():
                    self._training.model.get_parameter(name).home.write_(average)  # type: ignore[attr-defined]
            self._forget()
            yield
        finally:
            with torch.no_grad():
                restore_parameters(self._training, own)
            self._forget()
            self._is_open = False

    def _own(self) -> dict[str, Tree]:
        """What `restore_parameters` puts back: the weights, with their lower halves where they are split."""
        states = self._training.optimizer.state_dict()["state"]  # brings everything home
        lower = {index: {"low": values["low"].clone()} for index, values in states.items() if "low" in values}
        parameters = self._training.model.named_parameters()
        return {
            "parameters": {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters},
            "optimizer": {"state": lower},
        }

    def _forget(self) -> None:
        """What is on the device is of other weights."""
        assert isinstance(self._training.optimizer, Streamed)
        self._training.optimizer.forget()

    def state(self) -> Tree:
        """Everything, as a tree of live tensors."""
        return {"steps": self._steps, "observed": self._observed, "average": dict(self._average)}

    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned."""
        self._steps, self._observed = state["steps"], state["observed"]
        self._average = {name: average.to("cpu", copy=True) for name, average in state["average"].items()}
