"""Weights that travel packed: in three quarters of their bytes, and exactly as they are.

The link is what streamed training waits for where a step has few tokens. Of the 16 bits of a weight the exponent says
little that its neighbours' do not, so on the way between host and device it takes 4 bits instead of 8 (see
`kernels/packed.py`). The device packs what it sends home and unpacks what it fetches, piece by piece, through a few
small places, in lanes beside the computation. Host memory then holds a packed piece at the beginning of that piece's
own bytes: nothing is there twice, and whoever wants to read asks for it to be brought home plainly.

A packed group of weights has room for some that are far smaller than the largest. Where one needs more, the device,
which alone knows in time, keeps it whole: what has no room among the packed bytes it writes itself into the bytes of
the piece that packing has saved. From the next time on such a piece is sent as it is, for as long as it needs that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtrainer.kernels.packed import ESCAPES, GROUP, count_escapes_, pack_, packed_bytes, unpack_
from hybridtrainer.memory.carriers import Carrier, Sent, copy
from hybridtrainer.memory.lanes import Event, Lanes
from hybridtrainer.memory.places import Home, Slot, cut

PIECE_ELEMENTS = 1 << 25  # a kernel each, for which the host takes as long as for two copies
LEAST_PIECES = 4  # of the largest key
# Each way, places hold what the link carries until the computation lets a kernel of another stream in between, which
# with large products is seldom.
PLACES_SHARE = 1 / 3  # of a block
FEW_PLACES = 3  # one is copied, one computed with, one waits
_GROUP_BYTES = 2 * GROUP


class Piece(NamedTuple):
    """Bytes of a key that travel together.

    Attributes:
        here: In the slot.
        host: In host memory.
        groups: Of the key, where they can be packed.
    """

    here: Tensor
    host: Tensor
    groups: slice

    @property
    def is_whole(self) -> bool:
        """Whether it can be packed; the last piece of a key may be less than a group."""
        return len(self.here) % _GROUP_BYTES == 0

    @property
    def packed_bytes(self) -> int:
        """What it takes when it is packed."""
        return packed_bytes(len(self.here) // 2)

    @property
    def rest(self) -> Tensor:
        """Bytes in host memory that packing saves."""
        return self.host[self.packed_bytes :]


@dataclass(eq=False)
class _Place:
    """Where packed bytes wait on the device between a copy and the computation."""

    buffer: Tensor
    free: Event = None


@dataclass(eq=False)
class _Known:
    """What is known of a key's pieces.

    Attributes:
        needed: By each piece, the escapes that it needed when it was last sent, on the device.
        whole: By each group, whether it was kept whole, on the device.
        told: What was needed, on the host, as far as it was told; an old value does no harm.
        telling: When it is told what was last sent.
        packed: The pieces that lie packed in host memory.
    """

    needed: Tensor
    whole: Tensor
    told: Tensor
    telling: Event = None
    packed: set[int] = field(default_factory=set)


class Packing(Carrier):
    """Packs what fits.

    Args:
        largest: Bytes of the largest key.
    """

    def __init__(self, lanes: Lanes, device: torch.device, largest: int) -> None:
        super().__init__(lanes, "weights in", "weights out")
        self._device = device
        self._known: dict[Hashable, _Known] = {}
        self._piece_elements = piece_elements(largest)
        nbytes, count = place_bytes(largest), places(largest)
        made = [_Place(torch.empty(nbytes, dtype=torch.uint8, device=device), lanes.mark()) for _ in range(2 * count)]
        self._coming, self._going = made[:count], made[count:]

    def packed(self) -> list[Any]:
        """The keys of which host memory has something packed."""
        return [key for key, known in self._known.items() if known.packed]

    def forget(self, key: Hashable | None = None) -> None:
        """Somebody has written this key, or all keys, plainly into host memory."""
        for each, known in self._known.items():
            if key is None or each == key:
                known.packed = set()

    def fetch(self, key: Hashable, home: Home, slot: Slot, after: Sequence[Event]) -> Event:
        """Copies pieces into small places and unpacks them from there into the slot."""
        known = self._known.get(key)
        arrived: list[Event] = []
        for number, piece in enumerate(_pieces(home, slot.buffer, self._piece_elements)):
            if known is None or number not in known.packed:
                arrived.append(self._lanes.submit(self._inward, _copying(piece.here, piece.host), after))
            else:
                place = _next(self._coming)
                within, source = place.buffer[: piece.packed_bytes], piece.host[: piece.packed_bytes]
                copied = self._lanes.submit(self._inward, _copying(within, source), [*after, place.free])
                work = partial(unpack_, within, piece.rest, known.whole[piece.groups], piece.here)
                place.free = self._lanes.submit("unpacking", work, [copied])
                arrived.append(place.free)
            after = ()  # what comes later in a lane waits for what came before
        return self._lanes.submit("unpacking", _nothing, arrived)

    def send(self, key: Hashable, home: Home, slot: Slot, after: Event) -> Sent:
        """Packs pieces into small places and copies them home from there; what did not fit last time goes as it is."""
        pieces = list(_pieces(home, slot.buffer, self._piece_elements))
        if key not in self._known:
            self._known[key] = self._new(pieces)
        known = self._known[key]
        fits = [needed <= ESCAPES for needed in known.told.tolist()]
        known.packed = {number for number, piece in enumerate(pieces) if piece.is_whole and fits[number]}
        gone: list[Event] = []  # out of the slot
        copied: list[Event] = []
        for number, piece in enumerate(pieces):
            if number not in known.packed:
                gone.append(self._lanes.submit(self._outward, _copying(piece.host, piece.here), [after]))
        self._lanes.submit("packing", known.needed.zero_, [after, known.telling])
        for number, piece in enumerate(pieces):
            if not piece.is_whole:
                continue
            needed = known.needed[number : number + 1]
            if number not in known.packed:
                gone.append(self._lanes.submit("packing", partial(count_escapes_, piece.here, needed), []))
                continue
            place = _next(self._going)
            within, target = place.buffer[: piece.packed_bytes], piece.host[: piece.packed_bytes]
            work = partial(pack_, piece.here, within, piece.rest, known.whole[piece.groups], needed)
            packed = self._lanes.submit("packing", work, [place.free])
            place.free = self._lanes.submit(self._outward, _copying(target, within), [packed])
            gone.append(packed)
            copied.append(place.free)
        read = self._lanes.submit("packing", _nothing, gone)
        tell = partial(known.told.copy_, known.needed, non_blocking=True)
        known.telling = self._lanes.submit(self._outward, tell, [read, *copied])
        return Sent(read, known.telling)

    def send_plainly(self, key: Hashable, home: Home, slot: Slot, after: Event) -> Sent:
        """Sends a key home as it is, for those who read it there."""
        if key in self._known:
            self._known[key].packed = set()
        return super().send_plainly(key, home, slot, after)

    def _new(self, pieces: Sequence[Piece]) -> _Known:
        told = torch.full((len(pieces),), ESCAPES + 1, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        whole = torch.zeros(pieces[-1].groups.stop, dtype=torch.uint8, device=self._device)
        needed = torch.zeros(len(pieces), dtype=torch.int32, device=self._device)
        return _Known(needed, whole, told, self._lanes.mark())  # the computation makes the zeros


def piece_elements(largest: int) -> int:
    """Weights of a piece, where the largest key has so many bytes."""
    return min(PIECE_ELEMENTS, math.ceil(largest / LEAST_PIECES / _GROUP_BYTES) * GROUP)


def place_bytes(largest: int) -> int:
    """What a place for packed bytes takes."""
    return packed_bytes(piece_elements(largest))


def places(largest: int) -> int:
    """How many there are each way."""
    return max(FEW_PLACES, math.ceil(PLACES_SHARE * largest / (2 * piece_elements(largest))))


def staging_bytes(largest: int) -> int:
    """What all places for packed bytes take together."""
    return 2 * places(largest) * place_bytes(largest)


def _pieces(home: Home, buffer: Tensor, elements: int) -> Iterator[Piece]:
    """What a key is cut into; all but the last are whole groups, and that is less than one where it is not."""
    groups = 0
    for at, host in home.runs:
        whole = len(host) // _GROUP_BYTES * _GROUP_BYTES
        cuts = [*range(0, whole, 2 * elements), whole, len(host)]
        for start, stop in itertools.pairwise(cuts):
            if start < stop:
                before, groups = groups, groups + (stop - start) // _GROUP_BYTES
                yield Piece(buffer[at + start : at + stop], host[start:stop], slice(before, groups))


def _copying(target: Tensor, source: Tensor) -> Callable[[], None]:
    return partial(copy, cut(target), cut(source))


def _next(places: list[_Place]) -> _Place:
    """The place that was used longest ago."""
    place = places.pop(0)
    places.append(place)
    return place


def _nothing() -> None:
    """Work that marks a point in a lane."""
