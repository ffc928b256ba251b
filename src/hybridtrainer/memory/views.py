"""The tensors inside a slot, made once for each slot and layout: making them anew for every block would cost more."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

from hybridtrainer.memory.layout import Layout
from hybridtrainer.memory.places import Home, Slot, cut
from hybridtrainer.memory.portions import Part, Portion

T = TypeVar("T")


def weights_in(slot: Slot, layout: Layout) -> list[Tensor]:
    """The weights of a block, each in its shape."""
    return _once(slot, layout, "weights", lambda: [each.weight_view(slot.buffer) for each in layout.entries])


def trainable_in(slot: Slot, layout: Layout) -> list[Tensor]:
    """Only those that are trained. Parked gradients lie where the weights would."""
    return _once(
        slot, layout, "trainable", lambda: [each.weight_view(slot.buffer) for each in layout.entries if each.trainable]
    )


def targets_in(slot: Slot, layout: Layout) -> list[Tensor]:
    """The weights that updates change, flat."""
    return _once(slot, layout, "targets", lambda: [each.weight.view(slot.buffer) for each in layout.targets])


def states_in(slot: Slot, portion: Portion) -> list[dict[str, Tensor]]:
    """The optimizer states of each part of a portion, flat."""
    return _once(slot, portion, "states", lambda: [_views(part, slot.buffer) for part in portion.parts])


def pieces_in(slot: Slot, home: Home) -> list[Tensor]:
    """The bytes of a key, in the pieces in which it is copied."""
    return _once(
        slot,
        home.extents,
        "pieces",
        lambda: [piece for at, length in home.extents for piece in cut(slot.buffer[at : at + length])],
    )


def _views(part: Part, buffer: Tensor) -> dict[str, Tensor]:
    return {name: field.view(buffer) for name, field in part.states.items()}


def _once(slot: Slot, whole: Hashable, what: str, make: Callable[[], T]) -> T:
    key = (whole, what)  # held, so that no other one can take its place
    if key not in slot.views:
        slot.views[key] = make()
    found: T = slot.views[key]
    return found
