"""Depth forecasts: a model of repeated blocks begins as a few of them, from which the deep one is foreseen.

While the model is short, the blocks beyond the first few let their input pass, and neither they nor their gradients
are computed. When it grows, each of them becomes a copy of one that was trained, with its optimizer state; buffers and
what is frozen stay. Nothing of the model's structure changes, so that checkpoints, parameter groups and schedulers
know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from hybridtrainer.blocks import find_blocks
from hybridtrainer.config import DepthConfig, HybridTrainerConfig
from hybridtrainer.errors import ModelError


class Depth:
    """The blocks of a model, of which only the first few are computed until it grows.

    Args:
        blocks: All of them; none for a model that does not grow.
        short: How many are computed at first.
        settings: When it grows, and in which order.
        warmup_steps: When it grows if nobody knows where the run ends.

    Attributes:
        is_short: Whether it has not grown yet.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module] = (),
        short: int = 0,
        settings: DepthConfig | None = None,
        warmup_steps: int = 0,
    ) -> None:
        self.is_short = False
        self._blocks = tuple(blocks)
        self._short = short
        self._settings = settings or DepthConfig()
        self._warmup_steps = warmup_steps
        self._beside: list[tuple[Any, ...]] = []  # what the last computed block returned beside the hidden state
        self._own = [block.forward for block in blocks]
        self._around = [
            self._passing(own) if number >= short else self._computed(own) for number, own in enumerate(self._own)
        ]
        self._is_around = False
        self.be(short=bool(blocks))

    def be(self, *, short: bool) -> None:
        """Makes the blocks those of a short model, or leaves them as they are without this."""
        self.is_short, self._beside = short, []
        if short and not self._is_around:
            for block, around in zip(self._blocks, self._around, strict=True):
                block.forward = around
            self._is_around = True
        # Where others have put something around the blocks since, ours stays inside, and only calls what it is around.
        is_outermost = all(each.forward is around for each, around in zip(self._blocks, self._around, strict=True))
        if not short and self._is_around and is_outermost:
            for block, own in zip(self._blocks, self._own, strict=True):
                block.__dict__.pop("forward")
                if block.forward != own:
                    block.forward = own
            self._is_around = False

    @property
    def share(self) -> float:
        """Of the blocks, what is computed in a step."""
        return self._short / len(self._blocks) if self.is_short else 1.0

    def is_due(self, clock: int, end: int | None) -> bool:
        """Whether it grows now; `end` is where the clock will end, if somebody knows."""
        return self.is_short and clock >= (self._warmup_steps if end is None else self._settings.until * end)

    @torch.no_grad()
    def grow(self, optimizer: Optimizer) -> str:
        """Makes the model deep. Returns what was done, for the log."""
        trained_here = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for target, source in self._pairs():
            for own, trained in zip(target.parameters(), source.parameters(), strict=True):
                if id(own) not in trained_here or not own.requires_grad:
                    continue  # who froze it knows what it is to be
                own.copy_(trained)
                if trained in optimizer.state:
                    optimizer.state[own] = deepcopy(optimizer.state[trained])
        self.be(short=False)
        return f"grown from {self._short} to {len(self._blocks)} blocks, by {self._settings.order}"

    def _pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Blocks that are replaced, each with the one that it becomes a copy of; no source has been replaced before."""
        count = len(self._blocks)
        for number in reversed(range(count)):
            source = number % self._short if self._settings.order == "stack" else number * self._short // count
            if source != number:
                yield self._blocks[number], self._blocks[source]

    def _computed(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            if self.is_short:
                self._beside = [result[1:]] if isinstance(result, tuple) else []
            return result

        return forward

    def _passing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.is_short:
                return own(*args, **kwargs)
            hidden = args[0] if args else next(iter(kwargs.values()))
            return (hidden, *self._beside[0]) if self._beside else hidden

        return forward


_known: WeakKeyDictionary[nn.Module, Depth] = WeakKeyDictionary()


def make_depth(model: nn.Module, config: HybridTrainerConfig) -> Depth:
    """What the configuration asks for.

    Raises:
        ModelError: if the model has no repeated blocks, or too few of them.
    """
    before = _known.pop(model, None)
    if before is not None:  # of another trainer, which has left the model short
        before.be(short=False)
    if "depth" not in config.predict:
        return Depth()
    blocks = find_blocks(model).modules
    short = max(1, round(config.depth.share * len(blocks)))
    if short == len(blocks):
        raise ModelError(
            f"The model has {len(blocks)} blocks, and depth.share = {config.depth.share:g} of them are all.",
            "Choose a smaller share, or leave depth out of predict.",
        )
    depth = _known[model] = Depth(blocks, short, config.depth, config.warmup_steps)
    return depth
