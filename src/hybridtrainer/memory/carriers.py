"""How what lives in host memory comes into a slot and goes home again: by plain copies, in the lanes of its kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from hybridtrainer.memory.lanes import Event, Lane, Lanes
from hybridtrainer.memory.places import Home, Slot
from hybridtrainer.memory.views import pieces_in


class Sent(NamedTuple):
    """What was sent home.

    Attributes:
        read: When the slot has been read, so that it may be written again.
        home: When host memory has it.
    """

    read: Event
    home: Event


class Carrier:
    """Copies bytes as they are.

    Args:
        inward: The lane by which keys come in.
        outward: The lane by which they go home.
    """

    def __init__(self, lanes: Lanes, inward: Lane, outward: Lane) -> None:
        self._lanes = lanes
        self._inward: Lane = inward
        self._outward: Lane = outward

    def fetch(self, key: Hashable, home: Home, slot: Slot, after: Sequence[Event]) -> Event:  # noqa: ARG002
        """Brings a key into a slot, after these events. Returns when it is there."""
        return self._lanes.submit(self._inward, partial(copy, pieces_in(slot, home), home.pieces), after)

    def send(self, key: Hashable, home: Home, slot: Slot, after: Event) -> Sent:  # noqa: ARG002
        """Sends home what the computation has left in a slot."""
        sent = self._lanes.submit(self._outward, partial(copy, home.pieces, pieces_in(slot, home)), [after])
        return Sent(sent, sent)

    def send_plainly(self, key: Hashable, home: Home, slot: Slot, after: Event) -> Sent:
        """Sends a key home as it is, for those who read it there."""
        return Carrier.send(self, key, home, slot, after)

    def packed(self) -> list[Any]:
        """The keys that host memory does not have plainly."""
        return []

    def forget(self, key: Hashable | None = None) -> None:
        """Somebody has written this key, or all keys, plainly into host memory."""


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Piece by piece."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
