"""Depth forecasts: a model of repeated blocks begins as a few of them, from which the deep one is foreseen.

While the model is short, the blocks beyond the first few let their input pass, and neither they nor their gradients
are computed. When it grows, each of them becomes a copy of one that was trained, with its optimizer state. Nothing of
the model's structure changes, so that checkpoints, parameter groups and schedulers know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
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
        self.is_short = bool(blocks)
        self._blocks = tuple(blocks)
        self._short = short
        self._settings = settings or DepthConfig()
        self._warmup_steps = warmup_steps
        self._beside: list[tuple[Any, ...]] = []  # what the last computed block returned beside the hidden state
        for number, block in enumerate(blocks):
            block.forward = self._passing(block.forward) if number >= short else self._computed(block.forward)

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
        for target, source in self._pairs():
            for own, trained in zip(_tensors(target), _tensors(source), strict=True):
                own.copy_(trained)
            for own, trained in zip(target.parameters(), source.parameters(), strict=True):
                if trained in optimizer.state:
                    optimizer.state[own] = {name: _copy(value) for name, value in optimizer.state[trained].items()}
        self.is_short = False
        return f"grown from {self._short} blocks to {len(self._blocks)}, by {self._settings.order}"

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
                self._beside[:] = [result[1:]] if isinstance(result, tuple) else []
            return result

        return forward

    def _passing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.is_short:
                return own(*args, **kwargs)
            hidden = args[0] if args else next(iter(kwargs.values()))
            return (hidden, *self._beside[0]) if self._beside else hidden

        return forward


def make_depth(model: nn.Module, config: HybridTrainerConfig) -> Depth:
    """What the configuration asks for.

    Raises:
        ModelError: if the model has no repeated blocks, or too few of them.
    """
    if "depth" not in config.predict:
        return Depth()
    blocks = find_blocks(model).modules
    short = max(1, round(config.depth.share * len(blocks)))
    if short == len(blocks):
        raise ModelError(
            f"The model has {len(blocks)} blocks, and depth.share = {config.depth.share:g} of them are all.",
            "Choose a smaller share, or leave depth out of predict.",
        )
    return Depth(blocks, short, config.depth, config.warmup_steps)


def _tensors(block: nn.Module) -> Iterator[Tensor]:
    yield from block.parameters()
    yield from block.buffers()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
