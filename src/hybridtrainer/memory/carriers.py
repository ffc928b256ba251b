"""How what lives in host memory comes into a slot and goes home again: by plain copies, in the lanes of its kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hybridtrainer.memory.lanes import Event, Lane, Lanes

PIECE_BYTES = 32 << 20  # about what a packed piece has, so that neither waits long for the other

Home = Sequence[tuple[int, Tensor]]
"""Where a key lives: bytes in host memory, each with its place in a slot."""


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

    def fetch(self, key: Hashable, home: Home, buffer: Tensor, after: Sequence[Event]) -> Event:  # noqa: ARG002
        """Brings a key into a slot, after these events. Returns when it is there."""
        return self._lanes.submit(self._inward, lambda: copy_in(buffer, home), after)

    def send(self, key: Hashable, home: Home, buffer: Tensor, after: Event) -> Sent:  # noqa: ARG002
        """Sends home what the computation has left in a slot."""
        sent = self._lanes.submit(self._outward, lambda: copy_out(home, buffer), [after])
        return Sent(sent, sent)

    def send_plainly(self, key: Hashable, home: Home, buffer: Tensor, after: Event) -> Sent:
        """Sends a key home as it is, for those who read it there."""
        return Carrier.send(self, key, home, buffer, after)

    def packed(self) -> list[Any]:
        """The keys that host memory does not have plainly."""
        return []

    def forget(self, key: Hashable | None = None) -> None:
        """Somebody has written this key, or all keys, plainly into host memory."""


def copy_in(buffer: Tensor, home: Home) -> None:
    """From host memory into a slot."""
    for at, host in home:
        copy(buffer[at : at + len(host)], host)


def copy_out(home: Home, buffer: Tensor) -> None:
    """From a slot into host memory."""
    for at, host in home:
        copy(host, buffer[at : at + len(host)])


def copy(target: Tensor, source: Tensor) -> None:
    """In pieces: what another lane copies in the same direction comes in between them."""
    for start in range(0, len(source), PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        target[piece].copy_(source[piece], non_blocking=True)


def size(home: Home) -> int:
    """What a key takes of a slot."""
    return max(at + len(host) for at, host in home)
