"""The places of one engine: a ring each for weights, optimizer states and parked gradients, and what stays in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtrainer.memory.slots import Key, Ring
from hybridtrainer.memory.units import PortionKey

SPARE_STATE_SLOTS = 2  # one is filled and one emptied, beside all that an update of a block takes
FEW_SLOTS = 2  # for weights, where most of them stay
SMALL_SHARE = 1 / 16  # of a slot; what is smaller stays, rather than take up a slot while it passes


@dataclass(frozen=True)
class Rings:
    """Three rings.

    Attributes:
        gradients: None where updates are fused into the backward pass.
    """

    weights: Ring[int]
    states: Ring[PortionKey]
    gradients: Ring[int] | None = None

    def __iter__(self) -> Iterator[Ring[Any]]:
        """Those that there are."""
        return (ring for ring in (self.weights, self.states, self.gradients) if ring is not None)

    def keep(self, spare_bytes: int, blocks: Sequence[int], portions: Sequence[PortionKey]) -> int:
        """Uses more of the device's memory so that less is copied.

        A byte of weights saves three bytes of copies in a step, one of states two.

        Args:
            blocks: Keys of the weights that pass.
            portions: Of the states.

        Returns:
            What is left.
        """
        if len(self.weights.slots) > FEW_SLOTS and spare_bytes >= len(blocks) // 2 * self.weights.slot_bytes:
            self.weights.narrow()
            spare_bytes += self.weights.slot_bytes
        spare_bytes -= _pin_evenly(self.weights, blocks, spare_bytes)
        return spare_bytes - _pin_evenly(self.states, portions, spare_bytes)

    def keep_small(self, sizes: Mapping[PortionKey, int]) -> None:
        """Keeps states that are much smaller than a slot, as those of the last norm and all of factored blocks are.

        A copy waits until the one before it in its direction has ended, however large that is and whatever its lane:
        a state of a megabyte that comes behind the weights of a block would hold up its update.
        """
        self.states.pin([key for key, size in sizes.items() if size <= SMALL_SHARE * self.states.slot_bytes])

    def release(self, in_use: Sequence[int]) -> bool:
        """Gives up one thing that stays, for its memory. Returns False where there is nothing left.

        What `keep_small` keeps would not help.

        Args:
            in_use: Blocks whose weights are being computed with.
        """
        return self.states.release((), _least_bytes(self.states)) or self.weights.release(in_use)

    def spare_bytes(self) -> int:
        """What `release` would give up, one after the other."""
        weights = sum(slot.buffer.nbytes for slot in self.weights.pinned.values())
        states = (slot.buffer.nbytes for slot in self.states.pinned.values())
        return weights + sum(nbytes for nbytes in states if nbytes >= _least_bytes(self.states))


def state_slots(portions: int, max_gpu_blocks: int) -> int:
    """How many places states need, where those of a block are so many portions.

    An update of a block must find all of them there, or it would wait for the link.
    """
    return max(1, portions) + min(SPARE_STATE_SLOTS, max_gpu_blocks - 1)  # of embedding and head, if of nothing else


def _pin_evenly(ring: Ring[Key], keys: Sequence[Key], spare_bytes: int) -> int:
    """Pins as many keys as there is room for, spread so that the link is never idle. Returns what they take."""
    passing = [key for key in keys if key not in ring.pinned]
    count = min(spare_bytes // ring.slot_bytes, max(0, len(passing) - len(ring.slots)))
    ring.pin([passing[number * len(passing) // count] for number in range(count)])
    return count * ring.slot_bytes


def _least_bytes(ring: Ring[Any]) -> int:
    return int(SMALL_SHARE * ring.slot_bytes) + 1
