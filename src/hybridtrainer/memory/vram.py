"""How much of a GPU's memory a run uses: torch's allocator, the driver beside it, and what it all is measured against.

Reads; what to do about it is in `pressure.py`. Nothing here waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from hybridtrainer.memory.driver import Driver, asking
from hybridtrainer.memory.optimizer import StreamedOptimizer


class AllocatorUse(NamedTuple):
    """Figures of torch's allocator: what tensors take, what it has taken from the card, and the peaks of both."""

    allocated_bytes: int
    allocated_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int


class Allocator(Protocol):
    """Who hands out a GPU's memory."""

    def read(self) -> AllocatorUse:
        """Its figures."""
        ...

    def reset_peaks(self) -> None:
        """From now on peaks are those since this call."""
        ...

    def give_back(self) -> None:
        """Gives what no tensor takes back to the card."""
        ...


class CudaAllocator:
    """Torch's own, on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> AllocatorUse:
        """Its figures, of all of which one call asks: torch's single ones make the whole table each time."""
        figures = torch.cuda.memory_stats_as_nested_dict(self._device)
        if not figures:  # CUDA has not begun
            return AllocatorUse(0, 0, 0, 0)
        taken, held = figures["allocated_bytes"]["all"], figures["reserved_bytes"]["all"]
        return AllocatorUse(taken["current"], taken["peak"], held["current"], held["peak"])

    def reset_peaks(self) -> None:
        """Torch's peaks are the process's: whoever reads them beside us sees the reset."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def give_back(self) -> None:
        """The next tensors have to ask the card again, which takes time."""
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class VramUse:
    """GPU memory at one moment.

    Attributes:
        allocated_bytes: What tensors take.
        allocated_peak_bytes: The most they took since peaks were last begun.
        highest_allocated_bytes: The most they ever took.
        reserved_bytes: What torch has taken from the card.
        reserved_peak_bytes: The most it had since peaks were last begun.
        highest_reserved_bytes: The most it ever had.
        card_bytes: In use on the whole card, by everybody, as the driver says; None where it does not.
        spare_bytes: Of the reserved, what a streamed model gives up by itself before memory runs out.
        limit_bytes: What there is: the card's memory, or the budget of the run.
        has_budget: Whether the limit is a budget, which only torch's memory counts against.
    """

    allocated_bytes: int
    allocated_peak_bytes: int
    highest_allocated_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    highest_reserved_bytes: int
    card_bytes: int | None
    spare_bytes: int
    limit_bytes: int
    has_budget: bool

    @property
    def share(self) -> float:
        """How full it is, of 1; what would be given up by itself does not count."""
        used = self.reserved_bytes if self.has_budget else max(self.reserved_bytes, self.card_bytes or 0)
        return (used - self.spare_bytes) / self.limit_bytes


class Vram:
    """The memory of the GPU that a run is on.

    Args:
        allocator: Who hands it out.
        card_bytes: Memory of the card.
        budget_bytes: What the run may use of it; None for all.
        driver: Who knows of other processes; None where nobody does.
        spare: Bytes that the model would give up by itself.
    """

    def __init__(
        self,
        allocator: Allocator,
        card_bytes: int,
        budget_bytes: int | None = None,
        driver: Driver | None = None,
        spare: Callable[[], int] = lambda: 0,
    ) -> None:
        self._allocator = allocator
        self._limit = min(card_bytes, budget_bytes or card_bytes)
        self._has_budget = budget_bytes is not None
        self._driver = driver
        self._spare = spare
        self._highest_allocated = self._highest_reserved = 0

    @property
    def limit_bytes(self) -> int:
        """What there is: the card's memory, or the budget of the run."""
        return self._limit

    def read(self) -> VramUse:
        """The memory in use now."""
        use = self._allocator.read()
        self._highest_allocated = max(self._highest_allocated, use.allocated_peak_bytes)
        self._highest_reserved = max(self._highest_reserved, use.reserved_peak_bytes)
        card = self._driver.latest() if self._driver is not None else None
        return VramUse(
            allocated_bytes=use.allocated_bytes,
            allocated_peak_bytes=use.allocated_peak_bytes,
            highest_allocated_bytes=self._highest_allocated,
            reserved_bytes=use.reserved_bytes,
            reserved_peak_bytes=use.reserved_peak_bytes,
            highest_reserved_bytes=self._highest_reserved,
            card_bytes=card.used_bytes if card is not None else None,
            spare_bytes=self._spare(),
            limit_bytes=self._limit,
            has_budget=self._has_budget,
        )

    def begin_peaks(self) -> VramUse:
        """The memory in use now; from now on peaks are those since this call."""
        use = self.read()
        self._allocator.reset_peaks()
        return use

    def give_back(self) -> None:
        """Gives what torch has reserved and no tensor takes back to the card."""
        self._allocator.give_back()


def device_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """What tensors take on a GPU, and the most that torch has reserved there; None and None on any other device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None, None
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_reserved(device)


def vram_of(
    device: torch.device, budget_bytes: int | None = None, optimizer: torch.optim.Optimizer | None = None
) -> Vram | None:
    """The memory of a GPU; None for any other device.

    Args:
        device: Where the model is.
        budget_bytes: What the run may use; None for all of it.
        optimizer: Of the run: that of a streamed model says what it can give up.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    rings = optimizer.engine.rings if isinstance(optimizer, StreamedOptimizer) else None
    return Vram(
        CudaAllocator(device),
        properties.total_memory,
        budget_bytes,
        Driver(asking(f"GPU-{properties.uuid}")),
        (lambda: 0) if rings is None else rings.spare_bytes,
    )
