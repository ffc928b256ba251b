"""The training state as 64 numbers: a ring of the newest steps on the model's device, and what is read from it.

What the numbers are is in `kernels/feature_reference.py`. This module knows nothing of phases or forecasts: it is
told what to write down.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from hybridtrainer.kernels.feature_reference import COLUMNS, LENGTH, NAMES
from hybridtrainer.kernels.features import features

VALUES = attrgetter(*COLUMNS)

__all__ = ["NAMES", "FeatureRing", "StepSigns"]


@dataclass(frozen=True)
class StepSigns:
    """What is known of a real step, one column of the ring each.

    Attributes:
        loss: Training loss.
        grad_norm: Global gradient norm before clipping.
        rate: Learning rate of the first group.
        first_moment: Size of the optimizer's first moments; 0 if unknown.
        second_moment: Size of its second moments; 0 if unknown.
        warmup: 1 in Warmup.
        correct: 1 in Correct.
        steps_in_phase: Real steps made in the phase.
        steps_since_jump: Real steps since the last accepted jump, or since the beginning.
        clock: The run's clock.
        rate_ahead_5: Mean learning rate of the next 5 steps.
        rate_ahead_20: Of the next 20.
        rate_ahead_50: Of the next 50.
        error_5: By how many spreads the newest loss forecast 5 steps ahead that can be judged was too low.
        error_20: The same, 20 steps ahead.
        error_50: The same, 50 steps ahead.
    """

    loss: float
    grad_norm: float
    rate: float
    first_moment: float = 0.0
    second_moment: float = 0.0
    warmup: float = 0.0
    correct: float = 0.0
    steps_in_phase: float = 0.0
    steps_since_jump: float = 0.0
    clock: float = 0.0
    rate_ahead_5: float = 0.0
    rate_ahead_20: float = 0.0
    rate_ahead_50: float = 0.0
    error_5: float = 0.0
    error_20: float = 0.0
    error_50: float = 0.0


class FeatureRing:
    """The newest steps, on a device.

    Args:
        device: Where the ring is kept and read.

    >>> ring = FeatureRing()
    >>> ring.write(StepSigns(loss=2.0, grad_norm=1.0, rate=1e-3))
    >>> ring.read().shape
    torch.Size([64])
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self._rows = torch.zeros(LENGTH, len(COLUMNS), dtype=torch.float32, device=device)
        self._waiting: list[tuple[float, ...]] = []  # newest steps that are not in the ring yet

    @property
    def rows(self) -> Tensor:
        """(LENGTH, len(COLUMNS)): the row of step n is n % LENGTH, counted from 0."""
        if self._waiting:
            self._send()
        return self._rows

    def write(self, signs: StepSigns) -> None:
        """Adds a step; it is sent to the device with the others since the ring was last read."""
        self._waiting.append(VALUES(signs))
        self.count += 1
        if len(self._waiting) == LENGTH:
            self._send()

    def _send(self) -> None:
        """What the host knows is sent in one go, or in two around the end of the ring; nobody waits."""
        sent = torch.tensor(self._waiting, dtype=torch.float32, pin_memory=self._rows.is_cuda)
        start = (self.count - len(self._waiting)) % LENGTH
        before_end = min(len(sent), LENGTH - start)
        self._rows[start : start + before_end].copy_(sent[:before_end], non_blocking=True)
        if before_end < len(sent):
            self._rows[: len(sent) - before_end].copy_(sent[before_end:], non_blocking=True)
        self._waiting = []

    def write_on_device(self, first_column: str, values: Tensor) -> None:
        """Fills columns of the newest step, from one on, with values that are on the device and need never leave it."""
        start = COLUMNS.index(first_column)
        self.rows[(self.count - 1) % LENGTH, start : start + len(values)].copy_(values)

    def read(self) -> Tensor:
        """The features of the newest step, on the ring's device.

        Raises:
            IndexError: if no step has been written.
        """
        if not self.count:
            raise IndexError("no step has been written to the ring")
        return features(self.rows, self.count)

    def state(self) -> dict[str, Tensor | int]:
        """Live tensors and plain values, for a checkpoint."""
        return {"rows": self.rows, "count": self.count}

    def restore(self, state: dict[str, Tensor | int]) -> None:
        """Goes back to what `state` returned."""
        rows = state["rows"]
        assert isinstance(rows, Tensor)
        self._waiting = []
        self._rows.copy_(rows)
        self.count = int(state["count"])
