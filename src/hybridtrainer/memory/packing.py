"""Weights that travel packed: in three quarters of their bytes, and exactly as they are.

The link is what streamed training waits for where a step has few tokens. Of the 16 bits of a weight the exponent says
little that its neighbours' do not, so on the way between host and device it takes 4 bits instead of 8 (see
`kernels/packed.py`). The device packs what it sends home and unpacks what it fetches, piece by piece, through a few
small places, in lanes beside the computation. Host memory then holds a packed piece at the beginning of that piece's
own bytes: nothing is there twice, and whoever wants to read asks for it to be brought home plainly.

A packed group of weights has room for some that are far smaller than the largest. A piece is sent packed only where it
was seen, when it was last sent, to have room even if an update made its largest weight four times as large and what
was zero small. Should an update do more than that, weights are lost: that is found out before the piece is sent again
or read in host memory, and ends the run, whose last checkpoint is whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtrainer.errors import lost_on_the_way
from hybridtrainer.kernels.packed import ESCAPES, GROUP, pack_, packed_bytes, unpack_
from hybridtrainer.memory.carriers import Carrier, Home, Sent, copy
from hybridtrainer.memory.lanes import Event, Lanes

PIECE_ELEMENTS = 1 << 24
# Each way, places hold what the link carries until the computation lets a kernel of another stream in between, which
# with large products is seldom.
PLACES_SHARE = 1 / 3  # of a block
FEW_PLACES = 3  # one is copied, one computed with, one waits
_GROUP_BYTES = 2 * GROUP


class Piece(NamedTuple):
    """Bytes of a key that travel together: in the slot and in host memory."""

    here: Tensor
    host: Tensor

    @property
    def is_whole(self) -> bool:
        """Whether it can be packed; the last piece of a key may be less than a group."""
        return len(self.here) % _GROUP_BYTES == 0

    @property
    def packed_bytes(self) -> int:
        """What it takes when it is packed."""
        return packed_bytes(len(self.here) // 2)


@dataclass(eq=False)
class _Place:
    """Where packed bytes wait on the device between a copy and the computation."""

    buffer: Tensor
    free: Event = None


@dataclass(eq=False)
class _Known:
    """What is known of a key's pieces.

    Attributes:
        needed: By each piece, what groups needed when it was last sent, as `pack_` tells it, on the device.
        told: The same on the host, since `home`.
        packed: The pieces that lie packed in host memory.
    """

    needed: Tensor
    told: Tensor
    home: Event = None
    is_told: bool = False
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
        nbytes, count = place_bytes(largest), places(largest)
        made = [_Place(torch.empty(nbytes, dtype=torch.uint8, device=device), lanes.mark()) for _ in range(2 * count)]
        self._coming, self._going = made[:count], made[count:]

    def packed(self) -> list[Hashable]:
        """The keys of which host memory has something packed."""
        return [key for key, known in self._known.items() if known.packed]

    def require_whole(self) -> None:
        """Checks that all that lies packed is what was sent.

        Raises:
            TornStepError: where it is not.
        """
        for key, known in self._known.items():
            if known.packed:
                self._look(key, known)

    def forget(self, key: Hashable | None = None) -> None:
        """Somebody has written this key, or all keys, plainly into host memory."""
        for each, known in self._known.items():
            if key is None or each == key:
                known.packed, known.is_told = set(), False

    def fetch(self, key: Hashable, home: Home, buffer: Tensor, after: Sequence[Event]) -> Event:
        """Copies pieces into small places and unpacks them from there into the slot."""
        packed = self._known[key].packed if key in self._known else ()
        arrived: list[Event] = []
        for number, piece in enumerate(_pieces(home, buffer)):
            if number not in packed:
                arrived.append(self._lanes.submit(self._inward, partial(copy, piece.here, piece.host), after))
            else:
                place = _next(self._coming)
                within, source = place.buffer[: piece.packed_bytes], piece.host[: piece.packed_bytes]
                copied = self._lanes.submit(self._inward, partial(copy, within, source), [*after, place.free])
                place.free = self._lanes.submit("unpacking", partial(unpack_, within, piece.here), [copied])
                arrived.append(place.free)
            after = ()  # what comes later in a lane waits for what came before
        return self._lanes.submit("unpacking", _nothing, arrived)

    def send(self, key: Hashable, home: Home, buffer: Tensor, after: Event) -> Sent:
        """Packs pieces into small places and copies them home from there; what does not fit goes as it is."""
        pieces = list(_pieces(home, buffer))
        if key not in self._known:
            self._known[key] = self._new(len(pieces))
        known = self._known[key]
        needed = self._look(key, known) if known.is_told else []
        known.packed = {
            number for number, (_, close) in enumerate(needed) if pieces[number].is_whole and close <= ESCAPES
        }
        gone: list[Event] = []  # out of the slot
        copied: list[Event] = []
        for number, piece in enumerate(pieces):
            if number not in known.packed:
                gone.append(self._lanes.submit(self._outward, partial(copy, piece.host, piece.here), [after]))
        self._lanes.submit("packing", known.needed.zero_, [after, known.home])
        for number, piece in enumerate(pieces):
            if not piece.is_whole:
                continue
            place = _next(self._going)
            within = place.buffer[: piece.packed_bytes]
            work = partial(pack_, piece.here, within, known.needed[number])
            place.free = packed = self._lanes.submit("packing", work, [place.free])
            gone.append(packed)
            if number in known.packed:
                target = piece.host[: piece.packed_bytes]
                place.free = self._lanes.submit(self._outward, partial(copy, target, within), [packed])
                copied.append(place.free)
        read = self._lanes.submit("packing", _nothing, gone)
        tell = partial(known.told.copy_, known.needed, non_blocking=True)
        known.home, known.is_told = self._lanes.submit(self._outward, tell, [read, *copied]), True
        return Sent(read, known.home)

    def send_plainly(self, key: Hashable, home: Home, buffer: Tensor, after: Event) -> Sent:
        """Sends a key home as it is, for those who read it there."""
        if key in self._known:
            self._known[key].packed = set()
        return super().send(key, home, buffer, after)

    def _new(self, pieces: int) -> _Known:
        told = torch.zeros(pieces, 2, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return _Known(torch.zeros(pieces, 2, dtype=torch.int32, device=self._device), told)

    def _look(self, key: Hashable, known: _Known) -> list[tuple[int, int]]:
        """What the pieces needed when they were last sent.

        Raises:
            TornStepError: where one that was sent packed needed more than there is.
        """
        self._lanes.host_wait(known.home)  # where it was sent in the last step, that is over
        needed: list[tuple[int, int]] = [(most, close) for most, close in known.told.tolist()]
        if any(needed[number][0] > ESCAPES for number in known.packed):
            raise lost_on_the_way(key)
        return needed


def place_bytes(largest: int) -> int:
    """What a place for packed bytes takes, where the largest key has so many."""
    return packed_bytes(min(PIECE_ELEMENTS, max(GROUP, largest // _GROUP_BYTES * GROUP)))


def places(largest: int) -> int:
    """How many there are each way."""
    return max(FEW_PLACES, math.ceil(PLACES_SHARE * largest / (2 * PIECE_ELEMENTS)))


def staging_bytes(largest: int) -> int:
    """What all places for packed bytes take together."""
    return 2 * places(largest) * place_bytes(largest)


def _pieces(home: Home, buffer: Tensor) -> Iterator[Piece]:
    """What a key is cut into; all but the last are whole groups, and that is less than one where it is not."""
    for at, host in home:
        whole = len(host) // _GROUP_BYTES * _GROUP_BYTES
        cuts = [*range(0, whole, 2 * PIECE_ELEMENTS), whole, len(host)]
        for start, stop in itertools.pairwise(cuts):
            if start < stop:
                yield Piece(buffer[at + start : at + stop], host[start:stop])


def _next(places: list[_Place]) -> _Place:
    """The place that was used longest ago."""
    place = places.pop(0)
    places.append(place)
    return place


def _nothing() -> None:
    """Work that marks a point in a lane."""
