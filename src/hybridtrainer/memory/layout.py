"""How the parameters of a block lie in one run of bytes: weights in one, optimizer states in another.

A block travels as two copies, whatever it is made of. Equal blocks have equal layouts, so that the views into a slot
are made once. This module knows shapes and types, no devices and no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrainer.kernels.formats import Format, state_fields, weight_dtype

ALIGNMENT = 256  # bytes; vector loads and copies want it


@dataclass(frozen=True)
class Field:
    """A flat tensor inside a run of bytes."""

    dtype: torch.dtype
    start: int
    elements: int

    @property
    def stop(self) -> int:
        """Where its bytes end."""
        return self.start + self.elements * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor inside `buffer`, a flat tensor of bytes."""
        return buffer[self.start : self.stop].view(self.dtype)


@dataclass(frozen=True)
class Entry:
    """A parameter of a block.

    Attributes:
        name: Its name inside the block.
        trainable: Frozen parameters travel too, but have no state and get no gradient.
        states: Its optimizer state, by name.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    trainable: bool
    weight: Field
    states: dict[str, Field]

    def weight_view(self, buffer: Tensor) -> Tensor:
        """The weight in its shape."""
        return self.weight.view(buffer).view(self.shape)

    def state_views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The optimizer state, each part flat."""
        return {name: field.view(buffer) for name, field in self.states.items()}


@dataclass(frozen=True)
class Layout:
    """Where everything in a block is."""

    entries: tuple[Entry, ...]
    weight_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class Kind:
    """What a layout needs to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    format: Format
    trainable: bool
    dtype: torch.dtype | None = None  # of a frozen parameter, which keeps its own

    def weight_dtype(self) -> torch.dtype:
        """How its weight is kept."""
        return self.dtype if self.dtype is not None else weight_dtype(self.format)


def lay_out(kinds: Iterable[Kind]) -> Layout:
    """Puts parameters one after the other, each part aligned.

    >>> layout = lay_out([Kind("w", (8, 8), "fp32", True)])
    >>> layout.weight_bytes, sorted(layout.entries[0].states)
    (256, ['m', 'v'])
    """
    entries: list[Entry] = []
    weight_end = state_end = 0
    for kind in kinds:
        weight = Field(kind.weight_dtype(), weight_end, math.prod(kind.shape))
        weight_end = _aligned(weight.stop)
        states: dict[str, Field] = {}
        if kind.trainable:
            for name, (dtype, elements) in state_fields(kind.format, kind.shape).items():
                states[name] = Field(dtype, state_end, elements)
                state_end = _aligned(states[name].stop)
        entries.append(Entry(kind.name, kind.shape, kind.format, kind.trainable, weight, states))
    return Layout(tuple(entries), weight_end, state_end)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
