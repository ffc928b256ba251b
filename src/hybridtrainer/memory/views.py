"""The tensors inside a slot, made once for each slot and layout: making them anew for every block would cost more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from hybridtrainer.memory.layout import Layout
from hybridtrainer.memory.slots import Slot

T = TypeVar("T")


class Views:
    """Views into slots."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, str], Any] = {}

    def weights(self, slot: Slot, layout: Layout) -> list[Tensor]:
        """The weights of a block, each in its shape."""
        return self._once(slot, layout, "weights", lambda: [each.weight_view(slot.buffer) for each in layout.entries])

    def trainable(self, slot: Slot, layout: Layout) -> list[Tensor]:
        """Only those that are trained. Parked gradients lie where the weights would."""
        return self._once(
            slot,
            layout,
            "trainable",
            lambda: [each.weight_view(slot.buffer) for each in layout.entries if each.trainable],
        )

    def states(self, slot: Slot, layout: Layout) -> list[dict[str, Tensor]]:
        """The optimizer states of what is trained."""
        return self._once(
            slot, layout, "states", lambda: [each.state_views(slot.buffer) for each in layout.entries if each.trainable]
        )

    def _once(self, slot: Slot, layout: Layout, what: str, make: Callable[[], T]) -> T:
        key = (id(slot), id(layout), what)
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found
