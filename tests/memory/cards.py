"""A GPU that tests fill as they like."""

from __future__ import annotations

from hybridtrainer.memory.driver import CardUse, Driver
from hybridtrainer.memory.vram import AllocatorUse, Vram

GIB = 1 << 30


class FakeAllocator:
    """Holds what a test says; giving back leaves what tensors take."""

    def __init__(self, allocated: float = 0.0, reserved: float = 0.0, peak: float | None = None) -> None:
        self.given_back = self.resets = 0
        self.hold(allocated, reserved, peak)

    def hold(self, allocated: float, reserved: float, peak: float | None = None) -> None:
        """In GiB."""
        top = allocated if peak is None else peak
        self.use = AllocatorUse(int(allocated * GIB), int(top * GIB), int(reserved * GIB), int(reserved * GIB))

    def read(self) -> AllocatorUse:
        return self.use

    def reset_peaks(self) -> None:
        self.resets += 1
        use = self.use
        self.use = AllocatorUse(use.allocated_bytes, use.allocated_bytes, use.reserved_bytes, use.reserved_bytes)

    def give_back(self) -> None:
        self.given_back += 1
        use = self.use
        self.use = use._replace(reserved_bytes=use.allocated_bytes)


class FakeDriver(Driver):
    """Answers at once."""

    def __init__(self, used_gib: float | None) -> None:
        super().__init__(lambda: None)
        self.used_gib = used_gib

    def latest(self) -> CardUse | None:
        return None if self.used_gib is None else CardUse(int(self.used_gib * GIB), 16 * GIB)


def card(allocator: FakeAllocator, budget_gib: float | None = None, driver: Driver | None = None) -> Vram:
    """A card of 16 GiB."""
    return Vram(allocator, 16 * GIB, None if budget_gib is None else int(budget_gib * GIB), driver)
