"""How the parameters of a block lie in one run of bytes: weights in one, optimizer states in another.

A block travels as two copies, whatever it is made of. Equal blocks have equal layouts, so that the views into a slot
are made once. Biases and norms lie side by side, so that one kernel updates them all. This module knows shapes and
types, no devices and no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hybridtrainer.kernels.formats import Format, state_fields, weight_dtype

ALIGNMENT = 256  # bytes; vector loads and copies want it
SIDE_BY_SIDE: Format = "split32"  # what has this format has no codes that span elements, and draws no random numbers


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

    def part(self, start: int, elements: int) -> Field:
        """Some elements of it."""
        return Field(self.dtype, self.start + start * self.dtype.itemsize, elements)

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
class Target:
    """What one update changes: a matrix, or the vectors of one parameter group, with gaps between them that stay 0.

    Attributes:
        members: Of the trainable entries, the number of each that is in it, and the element at which that begins.
    """

    format: Format
    weight: Field
    states: dict[str, Field]
    members: tuple[tuple[int, int], ...]

    def state_views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The optimizer state, each part flat."""
        return {name: field.view(buffer) for name, field in self.states.items()}


@dataclass(frozen=True, eq=False)  # compared by identity: equal blocks have the same one
class Layout:
    """Where everything in a block is.

    Attributes:
        targets: Each trainable entry is in one of them.
    """

    entries: tuple[Entry, ...]
    targets: tuple[Target, ...]
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
    group: int = 0  # parameters of one group have the same settings

    def weight_dtype(self) -> torch.dtype:
        """How its weight is kept."""
        return self.dtype if self.dtype is not None else weight_dtype(self.format)


def lay_out(kinds: Iterable[Kind]) -> Layout:
    """Puts parameters one after the other, each part aligned; vectors come last, by parameter group.

    >>> layout = lay_out([Kind("w", (8, 8), "fp32", True)])
    >>> layout.weight_bytes, sorted(layout.entries[0].states)
    (256, ['m', 'v'])
    """
    kinds = tuple(kinds)
    trainable = [index for index, kind in enumerate(kinds) if kind.trainable]
    entries: dict[int, Entry] = {}
    targets: list[Target] = []
    weight_end = state_end = 0
    for pile in _piles(kinds):
        first, is_alone = kinds[pile[0]], len(pile) == 1
        sizes = [math.prod(kinds[index].shape) for index in pile]
        starts = list(accumulate((aligned(size) for size in sizes), initial=0))
        shape = first.shape if is_alone else (starts.pop(),)
        weight = Field(first.weight_dtype(), weight_end, math.prod(shape))
        weight_end = aligned(weight.stop)
        states: dict[str, Field] = {}
        for name, (dtype, length) in state_fields(first.format, shape).items() if first.trainable else ():
            states[name] = Field(dtype, state_end, length)
            state_end = aligned(states[name].stop)
        for index, start, size in zip(pile, starts, sizes, strict=False):
            kind = kinds[index]
            own = states if is_alone else {name: field.part(start, size) for name, field in states.items()}
            entries[index] = Entry(kind.name, kind.shape, kind.format, kind.trainable, weight.part(start, size), own)
        if first.trainable:
            members = tuple((trainable.index(index), start) for index, start in zip(pile, starts, strict=False))
            targets.append(Target(first.format, weight, states, members))
    return Layout(tuple(entries[index] for index in range(len(kinds))), tuple(targets), weight_end, state_end)


def _piles(kinds: Sequence[Kind]) -> list[list[int]]:
    """Which parameters lie together: the vectors of a group, and each other one alone."""
    alone = [[index] for index, kind in enumerate(kinds) if not _is_vector(kind)]
    together: dict[int, list[int]] = {}
    for index, kind in enumerate(kinds):
        if _is_vector(kind):
            together.setdefault(kind.group, []).append(index)
    return [*alone, *together.values()]


def _is_vector(kind: Kind) -> bool:
    return kind.trainable and kind.format == SIDE_BY_SIDE


def aligned(count: int) -> int:
    """Rounded up to where the next one may begin."""
    return -(-count // ALIGNMENT) * ALIGNMENT
