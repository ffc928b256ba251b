"""Where a key is: at home in host memory, and in a slot on the device for as long as it is computed with.

What is copied at a time is cut out of both once. A step visits every block twice, and to cut anew for each copy would
take the host about as long as to launch it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridtrainer.memory.lanes import Event

PIECE_BYTES = 32 << 20  # about what a packed piece has, so that neither waits long for the other


class Home:
    """Where a key lives: runs of bytes in host memory, each with its place in a slot.

    Args:
        runs: Each with the byte of a slot at which it begins.

    Attributes:
        extents: Where each run begins in a slot, and its length; keys that lie alike have equal ones.
        pieces: The runs in pieces: what another lane copies in the same direction comes in between them.
        nbytes: What the key takes of a slot.
    """

    def __init__(self, runs: Sequence[tuple[int, Tensor]]) -> None:
        self.runs = tuple(runs)
        self.extents = tuple((at, len(host)) for at, host in self.runs)
        self.pieces = [piece for _, host in self.runs for piece in cut(host)]
        self.nbytes = max(at + length for at, length in self.extents)


@dataclass(eq=False)
class Slot:
    """A place on the device.

    Attributes:
        buffer: Its bytes.
        holds: What was copied into it; None when nothing of use.
        ready: When the copy inward has ended.
        used: When the computation has last used it, unless it was sent home since.
        home: When what goes home has been read, so that the slot may be written again.
        views: Tensors inside the buffer, as `views.py` keeps them.
    """

    buffer: Tensor
    holds: Any = None
    ready: Event = None
    used: Event = None
    home: Event = None
    views: dict[Any, Any] = field(default_factory=dict)

    def busy(self) -> list[Event]:
        """What must have ended before it is filled anew.

        The computation uses it when it is ready, so where it was used that says nothing more.
        """
        later = [event for event in (self.used, self.home) if event is not None]
        return later or [self.ready]


def cut(run: Tensor) -> list[Tensor]:
    """The pieces in which a run of bytes is copied."""
    return list(torch.split(run, PIECE_BYTES))
