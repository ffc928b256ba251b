"""The training state as 64 numbers: a ring of the newest steps on the model's device, and what is read from it.

What the numbers are is in `kernels/feature_reference.py`. This module knows nothing of phases or forecasts: it is
told what to write down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from hybridtrainer.kernels.feature_reference import COLUMNS, LENGTH, NAMES
from hybridtrainer.kernels.features import features

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
        self.rows = torch.zeros(LENGTH, len(COLUMNS), dtype=torch.float32, device=device)
        self.count = 0

    def write(self, signs: StepSigns) -> None:
        """Adds a step; what the host knows already is sent without waiting."""
        row = torch.tensor(astuple(signs), dtype=torch.float32, pin_memory=self.rows.is_cuda)
        self.rows[self.count % LENGTH].copy_(row, non_blocking=True)
        self.count += 1

    def write_on_device(self, columns: Sequence[str], values: Tensor) -> None:
        """Fills columns of the newest step with values that are on the device and need never leave it."""
        row = self.rows[(self.count - 1) % LENGTH]
        for column, value in zip(columns, values.unbind(), strict=True):
            row[COLUMNS.index(column)].copy_(value)

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
        self.rows.copy_(rows)
        self.count = int(state["count"])
