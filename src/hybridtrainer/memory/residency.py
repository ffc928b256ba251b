"""How much stays on the GPU: as much as the budget allows, where the computation would otherwise wait for copies.

Measured in the first two steps, not estimated: what the first step has reserved is what the model needs, and how long
the second has waited says whether more would help.
"""

from __future__ import annotations

import time

import torch

from hybridtrainer.memory.engine import Engine

USABLE_SHARE = 0.93  # of the budget; the rest is for fragments
STALL_SHARE = 0.02  # of a step; less is not worth memory


class Residency:
    """Watches the first steps of an engine and then lets it keep what fits.

    Args:
        engine: Of the model.
        budget_bytes: GPU memory that may be used; None keeps nothing.
    """

    def __init__(self, engine: Engine, budget_bytes: int | None) -> None:
        self._engine = engine
        self._budget = budget_bytes or 0
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
            stalled = engine.lanes.stalled_seconds()
            if stalled > STALL_SHARE * (time.perf_counter() - self._started):
                spare = USABLE_SHARE * self._budget - torch.cuda.max_memory_reserved(engine.device)
                engine.keep_on_device(max(0, int(spare)))
