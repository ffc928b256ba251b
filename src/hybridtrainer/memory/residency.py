"""How much stays on the GPU: as much as the budget allows, where the computation would otherwise wait for copies.

Measured in the first two steps, not estimated: what the first step has reserved is what the model needs, and how long
the second has waited says whether more would help. Where it has waited long, what does not stay travels packed for a
few steps, and for good if these are shorter than those before.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from importlib.util import find_spec

import torch

from hybridtrainer.memory.engine import Engine
from hybridtrainer.memory.layout import Layout
from hybridtrainer.memory.packing import staging_bytes

USABLE_SHARE = 0.93  # of the budget; the rest is for fragments
PACK_USABLE_SHARE = 0.97  # the same where weights are to be packed, which needs its memory once and for all
STALL_SHARE = 0.02  # of a step; less is not worth memory
HAS_TRITON = find_spec("triton") is not None  # torch's own operations would pack too slowly
PACK_SHARE = 0.1  # less is not worth the computation: weights are packed once in a step and unpacked twice
TIMED_STEPS = 2  # with packing and without; the shorter counts
PLAIN_BEFORE, PACKED_BEFORE = 1, 2  # steps that settle what stays, and what can be packed
DECIDED_STEPS = 2 + PLAIN_BEFORE + PACKED_BEFORE + 2 * TIMED_STEPS


def packs(stalled_share: float | None, room_bytes: float | None, layouts: Sequence[Layout]) -> bool:
    """Whether packing is tried: where steps wait long for weights, most have 16 bits, and there is room for it.

    Args:
        stalled_share: Of a step, how long it waits for copies; None where nobody knows, and then they do not.
        room_bytes: Of the device's memory; None for as much as is wanted.
        layouts: Of the blocks.
    """
    waits = stalled_share is not None and stalled_share > PACK_SHARE
    largest = max(layout.weight_bytes for layout in layouts)
    fits = room_bytes is None or room_bytes >= staging_bytes(largest)
    return waits and fits and all(_has_16_bits(layout) for layout in layouts)


def _has_16_bits(layout: Layout) -> bool:
    """Whether most of its bytes are of weights of 16 bits: others have no exponents where packing looks for them."""
    fields = [entry.weight for entry in layout.entries]
    halves = sum(field.stop - field.start for field in fields if field.dtype.itemsize == 2)
    return halves > layout.weight_bytes // 2


class Residency:
    """Watches the first steps of an engine and then lets it keep what fits.

    Args:
        engine: Of the model.
        budget_bytes: GPU memory that may be used; None keeps nothing.
        may_pack: Whether weights may travel packed.
    """

    def __init__(self, engine: Engine, budget_bytes: int | None, may_pack: bool = False) -> None:
        self._engine = engine
        self._budget = budget_bytes or 0
        self._may_pack = may_pack and HAS_TRITON
        self._course = self._decide()

    def after_step(self) -> None:
        """Goes on with what is to be decided. A model that has yet to grow says nothing of itself."""
        is_short = self._engine.depth < len(self._engine.blocks)
        if self._engine.device.type == "cuda" and not is_short:
            next(self._course, None)

    def _decide(self) -> Iterator[None]:
        """Waits for the next step where it yields; the first has ended when it begins."""
        engine, rings = self._engine, self._engine.rings
        started = self._now()
        engine.lanes.watch_stalls()
        yield
        share = engine.lanes.stalled_seconds() / (self._now() - started)
        if share <= STALL_SHARE:
            return
        reserved = torch.cuda.max_memory_reserved(engine.device)
        room = PACK_USABLE_SHARE * self._budget - reserved if self._budget else None
        spare = max(0, int(USABLE_SHARE * self._budget - reserved))
        if not (self._may_pack and packs(share, room, [unit.layout for unit in engine.blocks])):
            engine.keep_on_device(spare)
            return
        places = staging_bytes(rings.weights.slot_bytes)
        left = engine.keep_on_device(max(0, spare - places), states=False)
        kept = rings.spare_bytes()
        plain = yield from self._shortest(PLAIN_BEFORE)
        try:
            rings.weights.pack()
        except torch.OutOfMemoryError:  # there is room in sum, and none in one piece
            pass
        else:
            packed = yield from self._shortest(PACKED_BEFORE)
            if packed >= plain:
                rings.weights.pack_no_more()
                left += min(spare, places)
        if rings.spare_bytes() == kept:  # where memory has run out meanwhile, what was given up is not taken again
            engine.keep_on_device(left)

    def _shortest(self, before: int) -> Generator[None, None, float]:
        """Seconds of the shortest of some steps, after others that do not count."""
        for _ in range(before):
            yield
        found = []
        for _ in range(TIMED_STEPS):
            started = self._now()
            yield
            found.append(self._now() - started)
        return min(found)

    def _now(self) -> float:
        torch.cuda.synchronize(self._engine.device)
        return time.perf_counter()
