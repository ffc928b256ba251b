"""Epochs of a Lightning run that are left before their end, as `on_train_batch_start` may ask: what they take away.

A run that jumps or rolls back does not end with its epochs but with its schedule. Steps that an epoch has left out are
not to be made in further ones, so the end comes that much sooner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class LeftOut:
    """Counts the steps that were left out.

    Args:
        trainer: Lightning's.
        known: What `state` gave with the checkpoint that the run is resumed from; None for a new run.
    """

    def __init__(self, trainer: Any, known: Mapping[str, Any] | None) -> None:
        self._trainer = trainer
        self._epochs = None if trainer.fit_loop.max_epochs in (None, -1) else int(trainer.fit_loop.max_epochs)
        self._steps: int
        self._epoch: int
        self._steps, self._epoch = (known or {}).get("left_out", (0, -1))

    def note(self) -> bool:
        """Looks at the epoch that ends; whether it has left out something that was not counted yet."""
        trainer, progress = self._trainer, self._trainer.fit_loop.epoch_loop.batch_progress
        made, whole = progress.current.started, trainer.num_training_batches
        if not progress.is_last_batch or made >= whole or self._epoch == trainer.current_epoch or math.isinf(whole):
            return False
        self._epoch = trainer.current_epoch
        self._steps += self._in_an_epoch() - made // trainer.accumulate_grad_batches
        return True

    def end(self, steps: int) -> int:
        """Where a run of so many steps ends."""
        if self._epochs is None or not self._steps:
            return steps
        return min(steps, self._epochs * self._in_an_epoch() - self._steps)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"left_out": (self._steps, self._epoch)}

    def _in_an_epoch(self) -> int:
        return math.ceil(int(self._trainer.num_training_batches) / int(self._trainer.accumulate_grad_batches))
