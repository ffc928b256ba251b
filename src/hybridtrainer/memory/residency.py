"""How much stays on the GPU: as much as the budget allows, where the computation would otherwise wait for copies.

Where it waits long, and if that was asked for, what does not stay travels packed besides.

Measured in the first two steps, not estimated: what the first step has reserved is what the model needs, and how long
the second has waited says whether more would help.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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


def packs(stalled_share: float | None, room_bytes: float | None, layouts: Sequence[Layout]) -> bool:
    """Whether weights travel packed: where steps wait long for them, most have 16 bits, and there is room for it.

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
        self._steps = 0
        self._started = 0.0

    def after_step(self) -> None:
        """Takes note of a step; after the second one decides. A model that has yet to grow says nothing of itself."""
        is_short = self._engine.depth < len(self._engine.blocks)
        if self._engine.device.type != "cuda" or self._steps > 2 or is_short:
            return
        self._steps += 1
        engine = self._engine
        if self._steps == 1:
            torch.cuda.synchronize(engine.device)
            self._started = time.perf_counter()
            engine.lanes.watch_stalls()
        elif self._steps == 2:
            share = engine.lanes.stalled_seconds() / (time.perf_counter() - self._started)
            if share > STALL_SHARE:
                reserved = torch.cuda.max_memory_reserved(engine.device)
                room = PACK_USABLE_SHARE * self._budget - reserved if self._budget else None
                pack = self._may_pack and packs(share, room, [unit.layout for unit in engine.blocks])
                engine.keep_on_device(max(0, int(USABLE_SHARE * self._budget - reserved)), pack)
