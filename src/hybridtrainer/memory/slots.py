"""A few places on the device through which many blocks pass.

The computation waits until a slot is *ready*; the next copy inward waits until it was *used* and what was in it is
*home*, or, where it was foreseen and not used, until it is ready: that copy may have come by another lane. What is
fetched again waits until its own last copy home has ended. Nothing is read or overwritten too early, and with `poison`
what is freed is filled with NaN, so that a mistake would show.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import torch

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.carriers import Carrier, Sent, copy
from hybridtrainer.memory.lanes import Event, Lane, Lanes
from hybridtrainer.memory.packing import Packing, staging_bytes
from hybridtrainer.memory.places import Home, Slot
from hybridtrainer.memory.views import pieces_in

POISON = 0xFF  # as bf16 or fp32: NaN

Key = TypeVar("Key", bound=Hashable)


class Ring(Generic[Key]):
    """Slots of one size.

    Args:
        lanes: The lanes that fill them.
        count: How many slots.
        nbytes: Size of each.
        home: Where a key lives in host memory.
        inward: The lane by which keys come in.
        outward: The lane by which they go home.
        poison: Whether to fill what is freed with NaN.
    """

    def __init__(
        self,
        lanes: Lanes,
        count: int,
        nbytes: int,
        device: torch.device,
        home: Callable[[Key], Home],
        inward: Lane = "weights in",
        outward: Lane = "weights out",
        poison: bool = False,
    ) -> None:
        self._device = device
        self._lanes = lanes
        self._poison = poison
        self.slots = [self._new(nbytes) for _ in range(count)]  # keys pass through these; the latest is the last
        self.pinned: dict[Key, Slot] = {}  # keys that stay have each a place of their own
        self._home = home
        self._inward: Lane = inward
        self._outward: Lane = outward
        self._carrier = Carrier(lanes, inward, outward)
        self._on_the_way_home: dict[Key, Event] = {}
        self._changed: dict[Key, None] = {}  # pinned keys that the host has not got as they are
        self._standing: dict[tuple[tuple[int, int], ...], Slot] | None = None

    @property
    def slot_bytes(self) -> int:
        """What one more slot takes."""
        return self.slots[0].buffer.nbytes

    @property
    def nbytes(self) -> int:
        """What all of its places take."""
        return sum(slot.buffer.nbytes for slot in (*self.slots, *self.pinned.values())) + (
            staging_bytes(self.slot_bytes) if self.is_packed else 0
        )

    @property
    def is_packed(self) -> bool:
        """Whether what travels is packed where it can be."""
        return isinstance(self._carrier, Packing)

    def narrow(self) -> None:
        """Gives up a slot, between steps."""
        self._lanes.finish()  # nothing may read a slot whose memory is somebody else's
        del self.slots[0]

    def pack(self) -> None:
        """From now on what travels is packed where it can be, which takes `staging_bytes(slot_bytes)`."""
        if not self.is_packed:
            self._carrier = Packing(self._lanes, self._device, self.slot_bytes)

    def pack_no_more(self) -> None:
        """From now on all travels as it is."""
        self.unpack_home()
        self._carrier = Carrier(self._lanes, self._inward, self._outward)

    def pin(self, keys: Sequence[Key]) -> None:
        """Makes a place for each of these keys, where it stays."""
        for key in keys:
            self._leave(key)
            self.pinned[key] = self._new(self._home(key).nbytes)

    def release(self, in_use: Sequence[Key], least_bytes: int = 0) -> bool:
        """Brings one pinned key of that size home and gives up its place. Returns False where none can go."""
        large = (key for key, slot in self.pinned.items() if slot.buffer.nbytes >= least_bytes)
        key = next((key for key in large if key not in in_use), None)
        if key is None:
            return False
        if key in self._changed:
            self._send_plainly([key])  # to pack it would take memory, and it is wanted because there is none
        self._lanes.finish()
        self._changed.pop(key, None)
        del self.pinned[key]
        return True

    def prefetch(self, upcoming: Iterable[Key], in_use: Sequence[Key] = ()) -> None:
        """Starts to fetch what is needed next, as far as there is room beside what is in use."""
        if self._standing is not None:
            return
        room = len(self.slots) - sum(key not in self.pinned for key in in_use)
        wanted: list[Key] = []
        for key in upcoming:
            if len(wanted) >= room:
                break
            if key not in self.pinned and key not in in_use and key not in wanted:
                wanted.append(key)
        for key in wanted:
            if self._find(key) is None:
                self._fetch(key, keep=(*wanted, *in_use))

    def stop_copies(self) -> None:
        """From now on nothing is copied, to see what copies cost: all keys that lie alike share one slot."""
        self._standing = {}

    def take(self, key: Key, in_use: Sequence[Key] = ()) -> Slot:
        """The slot that holds `key`, fetched now if it was not foreseen; the computation waits for it."""
        if self._standing is not None:
            return self._stand_in(key)
        slot = self._find(key)
        if slot is None:
            slot = self._fetch(key, keep=in_use)
        self._lanes.wait(slot.ready)
        return slot

    def claim(self, key: Key, in_use: Sequence[Key] = ()) -> Slot:
        """A slot for `key` that the computation will fill itself."""
        slot = self._find(key) or self._vacate(key, in_use)
        self._lanes.wait(slot.ready)
        slot.holds, slot.ready = key, None
        self.may_write(slot)
        return slot

    def may_write(self, slot: Slot) -> None:
        """The computation will write into the slot, but not before its last copy outward has ended."""
        self._lanes.wait(slot.home)
        slot.home = None

    def used(self, slot: Slot) -> None:
        """The computation has used the slot up to here."""
        slot.used = self._lanes.mark()

    def write_back(self, slot: Slot) -> None:
        """The computation has changed what is in the slot: it is sent home, or, if it stays, will be when it must."""
        if slot.holds in self.pinned:
            self.used(slot)
            self._changed[slot.holds] = None
        else:
            self.send_home(slot)

    def send_home(self, slot: Slot) -> None:
        """Copies what the computation has left in the slot back to the host."""
        slot.used = self._lanes.mark()
        if self._standing is None:
            self._sent(slot, self._carrier.send(slot.holds, self._home(slot.holds), slot, slot.used))

    def bring_home(self) -> None:
        """Sends home what stays here and was changed, and what the host has packed, so that all can be read there."""
        self._send_plainly([*self._changed, *self._carrier.packed()])
        self._changed.clear()

    def unpack_home(self) -> None:
        """Lets the host have nothing packed any more, whatever it is worth. Returns when all copies have ended."""
        self._send_plainly(self._carrier.packed())
        self._lanes.finish()

    def _send_plainly(self, keys: Sequence[Key]) -> None:
        if self._standing is not None:
            return
        keys = list(dict.fromkeys(keys))
        for number, key in enumerate(keys, start=1):
            slot = self.take(key, in_use=(key,))
            slot.used = self._lanes.mark()
            self._sent(slot, self._carrier.send_plainly(key, self._home(key), slot, slot.used))
            self.prefetch(keys[number:], in_use=(key,))

    def drop(self, key: Key | None = None) -> None:
        """Forgets one key, or all: what the host has is newer.

        Raises:
            ModelError: if it was written into what is packed there.
        """
        if key is not None and key in self._carrier.packed():
            raise ModelError(
                f"Parameters of block {key} were written where host memory had them packed, and are lost.",
                "Load the last checkpoint, and call `model.optimizer.settle()` before parameters are read or written.",
            )
        self._leave(key)
        self._carrier.forget(key)

    def _leave(self, key: Key | None) -> None:
        for slot in (*self.slots, *self.pinned.values()):
            if key is None or slot.holds == key:
                slot.holds = None
        self._changed = {} if key is None else {each: None for each in self._changed if each != key}

    def _sent(self, slot: Slot, sent: Sent) -> None:
        slot.home, self._on_the_way_home[slot.holds] = sent
        slot.used = None  # what goes home has waited for it

    def has(self, keys: Iterable[Key]) -> bool:
        """Whether all these keys are here or on their way."""
        return all(self._find(key) is not None for key in keys)

    def _new(self, nbytes: int) -> Slot:
        """A new place. What the computation has queued may still read what was in this memory before."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if self._poison:
            buffer.fill_(POISON)
        return Slot(buffer, used=self._lanes.mark())

    def _find(self, key: Key) -> Slot | None:
        for slot in (self.pinned[key],) if key in self.pinned else self.slots:
            if slot.holds == key:
                return slot
        return None

    def _stand_in(self, key: Key) -> Slot:
        assert self._standing is not None
        home = self._home(key)
        if home.extents not in self._standing:
            slot = self._standing[home.extents] = self._new(home.nbytes)
            copy(pieces_in(slot, home), home.pieces)
        return self._standing[home.extents]

    def _vacate(self, key: Key, keep: Sequence[Key]) -> Slot:
        """A place for a key, with nothing in it that is to be kept."""
        if key in self.pinned:
            return self.pinned[key]
        empty = (slot for slot in self.slots if slot.holds is None)
        passed = (slot for slot in self.slots if slot.holds not in keep)
        slot = next(empty, None) or next(passed)
        self.slots.remove(slot)
        self.slots.append(slot)  # so that the one that was filled longest ago is the next to go
        return slot

    def _fetch(self, key: Key, keep: Sequence[Key]) -> Slot:
        slot = self._vacate(key, keep)
        slot.holds = None  # until all is queued: what is raised before leaves half of it
        after = [*slot.busy(), self._on_the_way_home.get(key)]
        if self._poison:
            after = [self._lanes.submit(self._inward, lambda: slot.buffer.fill_(POISON), after)]
        slot.ready = self._carrier.fetch(key, self._home(key), slot, after)
        self._on_the_way_home.pop(key, None)
        slot.holds, slot.used, slot.home = key, None, None
        return slot
