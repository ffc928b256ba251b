"""Host memory of exactly the size that is needed, from mmap, registered with CUDA piece by piece.

torch's allocator of pinned memory rounds every request up to a power of two; for tens of gigabytes that is the
difference between fitting and not. Room is checked before anything is allocated.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from hybridtrainer.errors import MemoryBudgetError
from hybridtrainer.sizes import as_size

PAGE_BYTES = 4096
RESERVE_BYTES = 1 << 30  # left to the rest of the machine
MORE_ROOM = "Close other programs, or use a machine with more."


class Piece(NamedTuple):
    """The same bytes twice, as tensors that torch takes for different ones.

    Attributes:
        shown: For parameters and states that others see; torch counts their writes.
        lanes: For the engine's own copies, which are not counted: a new count means that somebody else has written.
    """

    shown: Tensor
    lanes: Tensor

    def version(self) -> int:
        """How often others have written."""
        return self.shown._version


class Arena:
    """A run of host memory, given out in pieces of whole pages.

    Args:
        nbytes: Its size; the sum of `paged(size)` over the pieces.
        device: Where copies go; for a GPU each piece is registered, so that copies run beside the computation.
        limit_bytes: Host memory that may be used; None for all that is available.
        remedy: What to do where there is not as much.

    Raises:
        MemoryBudgetError: if there is not as much.
    """

    def __init__(
        self, nbytes: int, device: torch.device, limit_bytes: int | None = None, remedy: str = MORE_ROOM
    ) -> None:
        require_room(nbytes, limit_bytes, remedy)
        self.nbytes = nbytes
        self._device = device
        self._taken = 0
        self._registered: list[int] = []
        weakref.finalize(self, _unregister, self._registered)  # memory that is mapped anew must not be known to CUDA
        self._map = mmap.mmap(-1, max(nbytes, PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def take(self, nbytes: int) -> Piece:
        """The next piece, filled with zeros."""
        start, self._taken = self._taken, self._taken + paged(nbytes)
        if self._taken > self.nbytes:
            raise ValueError(f"{self._taken} bytes were taken of {self.nbytes}")
        if not nbytes:
            return Piece(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))
        shown, lanes = (torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start) for _ in range(2))
        if self._device.type == "cuda":
            shown.zero_()  # touches the pages with all cores; registering would do it with one
            self._register(shown.data_ptr(), paged(nbytes))
        return Piece(shown, lanes)

    def close(self) -> None:
        """Takes back the registrations. The memory goes when the last tensor in it does."""
        _unregister(self._registered)

    def _register(self, pointer: int, nbytes: int) -> None:
        error = _cudart().cudaHostRegister(pointer, nbytes, 0)
        if int(error):
            raise MemoryBudgetError(
                f"CUDA refused to register {as_size(nbytes)} of host memory (error {int(error)}).",
                "Raise the limit of locked memory (`ulimit -l unlimited`), or use a smaller model or mode.",
            )
        self._registered.append(pointer)


def paged(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def require_room(nbytes: int, limit_bytes: int | None = None, remedy: str = MORE_ROOM) -> None:
    """Says that there is too little host memory before any is allocated.

    Raises:
        MemoryBudgetError: naming what is needed and what there is.
    """
    available = psutil.virtual_memory().available - RESERVE_BYTES
    room = available if limit_bytes is None else min(limit_bytes, available)
    if nbytes > room:
        which = "are available" if room == available else "are allowed by `memory.ram`"
        raise MemoryBudgetError(
            f"Weights, optimizer states and gradients that wait need {as_size(nbytes)} of host memory and "
            f"{as_size(max(room, 0))} {which}.",
            remedy,
        )


def _unregister(pointers: list[int]) -> None:
    for pointer in pointers:
        _cudart().cudaHostUnregister(pointer)
    pointers.clear()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
