"""The places of one engine: a ring each for weights, optimizer states and parked gradients, and what stays in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridtrainer.memory.slots import Ring

STATE_SLOTS = 3  # one is filled, one updated, one emptied; a fourth would wait
FEW_SLOTS = 2  # for weights, where most of them stay
SMALL_SHARE = 1 / 16  # of a slot; what is smaller stays, rather than take up a slot while it passes


@dataclass(frozen=True)
class Rings:
    """Three rings.

    Attributes:
        gradients: None where updates are fused into the backward pass.
    """

    weights: Ring
    states: Ring
    gradients: Ring | None = None

    def __iter__(self) -> Iterator[Ring]:
        """Those that there are."""
        return (ring for ring in (self.weights, self.states, self.gradients) if ring is not None)

    def keep(self, spare_bytes: int, blocks: Sequence[int]) -> None:
        """Uses more of the device's memory so that less is copied.

        A byte of weights saves three bytes of copies in a step, one of states two. A third slot for states lets copies
        go on while an update is made.
        """
        if len(self.states.slots) < STATE_SLOTS and spare_bytes >= self.states.slot_bytes:
            self.states.widen()
            spare_bytes -= self.states.slot_bytes
        if len(self.weights.slots) > FEW_SLOTS and spare_bytes >= len(blocks) // 2 * self.weights.slot_bytes:
            self.weights.narrow()
            spare_bytes += self.weights.slot_bytes
        for ring in (self.weights, self.states):
            passing = [key for key in blocks if key not in ring.pinned]
            count = min(spare_bytes // ring.slot_bytes, max(0, len(passing) - len(ring.slots)))
            # Evenly spread, so that the link is never idle.
            ring.pin([passing[number * len(passing) // count] for number in range(count)])
            spare_bytes -= count * ring.slot_bytes

    def keep_small(self, sizes: Mapping[int, int]) -> None:
        """Keeps the states of units that are much smaller than a slot; they are few, such as the last norm."""
        self.states.pin([key for key, size in sizes.items() if size <= SMALL_SHARE * self.states.slot_bytes])

    def release(self, in_use: Sequence[int]) -> bool:
        """Gives up one thing that stays, for its memory. Returns False where there is nothing left.

        What `keep_small` keeps would not help.
        """
        return any(ring.release(in_use, _least_bytes(ring)) for ring in (self.states, self.weights))

    def spare_bytes(self) -> int:
        """What `release` would give up, one after the other."""
        sizes = ((slot.buffer.nbytes, _least_bytes(ring)) for ring in self for slot in ring.pinned.values())
        return sum(nbytes for nbytes, least in sizes if nbytes >= least)


def _least_bytes(ring: Ring) -> int:
    return int(SMALL_SHARE * ring.slot_bytes) + 1
