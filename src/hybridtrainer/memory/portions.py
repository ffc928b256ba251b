"""How the optimizer states of a block travel: in portions of about the same size, not all at once.

The states of a block are twice its weights, and those of an embedding can be more than a block's. With portions the
device needs room for a few of them, and they come, are updated and go while others are on their way. In host memory
each state stays in one run of bytes, so that checkpoints see nothing of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hybridtrainer.kernels.formats import elements_per_entry
from hybridtrainer.memory.layout import Field, Layout, Target, aligned

PORTION_BYTES = 64 << 20
GRAIN_ELEMENTS = 1 << 16  # parts of a target begin at multiples; every block of codes and every alignment divides it

Slice = tuple[int, int, int]
"""Of a target: its number, the first element, and how many."""


@dataclass(frozen=True)
class Part:
    """Some elements of a target, or all.

    Attributes:
        target: Its number in the layout.
        start: The first of the elements.
        states: Where the optimizer state of these elements is in the portion.
    """

    target: int
    start: int
    elements: int
    states: dict[str, Field]


@dataclass(frozen=True)
class Run:
    """Bytes that are copied at a time: from `start` to `stop` in a unit's states, and at `at` in the portion."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, eq=False)
class Portion:
    """What travels together.

    Attributes:
        runs: What it is made of, in host memory.
        nbytes: Its size on the device.
    """

    parts: tuple[Part, ...]
    runs: tuple[Run, ...]
    nbytes: int


@lru_cache(maxsize=256)  # equal blocks have one layout, and so the same portions
def divide(layout: Layout, limit_bytes: int = PORTION_BYTES) -> tuple[Portion, ...]:
    """The portions of a layout's states, of about equal size.

    >>> from hybridtrainer.memory.layout import Kind, lay_out
    >>> wide = lay_out([Kind("w", (1024, 1024), "fp32", True)])
    >>> [portion.nbytes >> 20 for portion in divide(wide, 4 << 20)]
    [4, 4]
    """
    if not layout.state_bytes:
        return ()
    count = -(-layout.state_bytes // limit_bytes)
    goal_bytes = -(-layout.state_bytes // count)
    piles: list[list[Slice]] = [[]]
    filled = 0.0
    for number, target in enumerate(layout.targets):
        total = target.weight.elements
        bytes_each = sum(field.stop - field.start for field in target.states.values()) / max(1, total)
        start = 0
        while start < total:
            rest, room = total - start, int((goal_bytes - filled) / bytes_each)
            fits = rest <= room or (len(piles) == count and target.format != "factored")
            fitting = rest if fits else _divided(target, room)
            if not fitting and piles[-1]:
                piles.append([])
                filled = 0.0
                continue
            fitting = fitting or min(rest, _divided(target, GRAIN_ELEMENTS) or rest)
            piles[-1].append((number, start, fitting))
            start, filled = start + fitting, filled + fitting * bytes_each
    return tuple(_portion(layout, pile) for pile in piles)


def _divided(target: Target, elements: int) -> int:
    """How many of so many elements can be taken of a target; none of a factored one, whose state is of all of them."""
    return 0 if target.format == "factored" else elements // GRAIN_ELEMENTS * GRAIN_ELEMENTS


def _portion(layout: Layout, slices: list[Slice]) -> Portion:
    runs: list[Run] = []
    parts = []
    is_open = False  # whether the last run ends where a state does: the next one, if whole up to there, may join it
    for number, start, elements in slices:
        target = layout.targets[number]
        per_entry = elements_per_entry(target.format)
        states = {}
        for name, field in target.states.items():
            own = _part_of(field, per_entry.get(name, 1), start, elements, target)
            at = aligned(_end(runs))
            if is_open and own.start == field.start == runs[-1].start + at - runs[-1].at:
                runs[-1] = Run(runs[-1].start, own.stop, runs[-1].at)
            else:
                runs.append(Run(own.start, own.stop, at))
            is_open = own.stop == field.stop
            states[name] = Field(own.dtype, at, own.elements)
        parts.append(Part(number, start, elements, states))
    return Portion(tuple(parts), tuple(runs), _end(runs))


def _part_of(field: Field, per_entry: int, start: int, elements: int, target: Target) -> Field:
    """The state of some elements of a target."""
    if elements == target.weight.elements:
        return field
    return field.part(start // per_entry, -(-elements // per_entry))


def _end(runs: list[Run]) -> int:
    return runs[-1].at + runs[-1].stop - runs[-1].start if runs else 0
