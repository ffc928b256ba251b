"""The arguments of a block's forward: which are tensors, which need a gradient, and how they divide by samples.

Blocks of different libraries take different things: a hidden state alone, or with masks, positions and flags, and
return a tensor or a tuple. The engine sees flat lists of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hybridtrainer.errors import ModelError


@dataclass(frozen=True)
class Call:
    """What was passed to a block, without its tensors.

    Attributes:
        leaves: Everything passed, in order; None in the place of each tensor.
        places: Where the tensors belong.
        spec: How the leaves nest.
    """

    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    spec: Any

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, list[Tensor]]:
        """Takes arguments apart into a call and its tensors."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        tensors = [leaves[index] for index in places]
        return Call(tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), places, spec), tensors

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Puts tensors in their places."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True)
class Result:
    """What a block returned, without its tensors."""

    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    spec: Any

    @staticmethod
    def of(value: Any) -> tuple[Result, list[Tensor]]:
        """Takes a result apart."""
        call, tensors = Call.of((value,), {})
        return Result(call.leaves, call.places, call.spec), tensors

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """Puts it together again."""
        (value,), _ = Call(self.leaves, self.places, self.spec).arguments(tensors)
        return value


def samples_of(tensors: Sequence[Tensor]) -> int:
    """How many samples a call has: the length of its first tensor, the hidden state."""
    return tensors[0].shape[0] if tensors and tensors[0].dim() else 1


def in_chunks(tensors: Sequence[Tensor], chunk_samples: int) -> Iterator[list[Tensor]]:
    """The tensors of `chunk_samples` samples at a time; what has no sample dimension goes to every chunk whole."""
    samples = samples_of(tensors)
    if chunk_samples >= samples:
        yield list(tensors)
        return
    divides = divided(tensors)
    for start in range(0, samples, chunk_samples):
        yield [
            tensor[start : start + chunk_samples] if each else tensor
            for tensor, each in zip(tensors, divides, strict=True)
        ]


def divided(tensors: Sequence[Tensor]) -> list[bool]:
    """Which tensors are divided with the samples.

    Raises:
        ModelError: where nobody can know.
    """
    return [_has_samples(tensor, tensors[0]) for tensor in tensors]


def _has_samples(tensor: Tensor, hidden: Tensor) -> bool:
    """Whether a tensor's first dimension counts samples.

    Raises:
        ModelError: where it may count positions as well, because there are as many of these: a mask of (time, time)
            and one of (samples, time) look alike then.
    """
    if not tensor.dim() or tensor.shape[0] != hidden.shape[0]:
        return False
    if tensor is not hidden and tensor.dim() < 3 and hidden.dim() > 2 and hidden.shape[1] == hidden.shape[0]:
        raise ModelError(
            f"A block gets {hidden.shape[0]} samples of {hidden.shape[1]} positions and a tensor of "
            f"{tuple(tensor.shape)}, whose first dimension may be either: the batch cannot be divided.",
            "Use a batch of another size, or `memory.split = 1`.",
        )
    return True
