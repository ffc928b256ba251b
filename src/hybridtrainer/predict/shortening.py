"""A stack of blocks that is short for a while: those behind the first few let their input pass.

What stands around the blocks is copied and pickled with the model, so that a copy is one of its own: it has its own
blocks, is as short as the model was, and stays so. Nothing is known here of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


class Shortening:
    """The blocks of one model, and whether those behind the first few are left out.

    Args:
        blocks: All of them, in their order.
        short: How many are computed while the model is short.

    Attributes:
        is_short: Whether the others are left out now.
        is_trained: Whether a step was made with the model while it was short. Its owner says so.
    """

    def __init__(self, blocks: Sequence[nn.Module] = (), short: int = 0) -> None:
        self.blocks, self.short = tuple(blocks), short
        self.is_short = self.is_trained = False
        self.beside: list[tuple[Any, ...]] = []  # what the last computed block returned beside the hidden state
        self._forwards: list[Forward] = []

    def be(self, *, short: bool) -> None:
        """Leaves blocks out from now on, or none."""
        self.is_short, self.beside = short, []
        if short and not self._forwards:
            self._forwards = [
                Forward(self, block, passes=number >= self.short) for number, block in enumerate(self.blocks)
            ]
            for each in self._forwards:
                each.block.forward = each
        # Where others have put something around the blocks since, ours stays inside, and only calls what it is around.
        if not short and all(each.block.__dict__.get("forward") is each for each in self._forwards):
            for each in self._forwards:
                del each.block.__dict__["forward"]
                if each.own is not None:
                    each.block.forward = each.own
            self._forwards = []

    def __getstate__(self) -> dict[str, Any]:
        """Without what is left from a forward pass, which has a graph."""
        return {**self.__dict__, "beside": []}


class Forward:
    """Stands for the `forward` of a block in a model that may be short."""

    def __init__(self, shortening: Shortening, block: nn.Module, *, passes: bool) -> None:
        self.shortening, self.block, self.passes = shortening, block, passes
        self.own = block.__dict__.get("forward")  # what others have put there; None for that of its class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the block would return, or its input."""
        shortening = self.shortening
        if self.passes and shortening.is_short:
            hidden = args[0] if args else next(iter(kwargs.values()))
            return (hidden, *shortening.beside[0]) if shortening.beside else hidden
        if self.own is not None:
            result = self.own(*args, **kwargs)
        else:
            result = type(self.block).forward(self.block, *args, **kwargs)
        if shortening.is_short:
            shortening.beside = [result[1:]] if isinstance(result, tuple) else []
        return result


def shortenings_of(model: nn.Module) -> list[Shortening]:
    """Whatever makes a model short, or once did and still stands around its blocks."""
    around = (value for module in model.modules() for value in module.__dict__.values() if isinstance(value, Forward))
    return list({id(each.shortening): each.shortening for each in around}.values())
