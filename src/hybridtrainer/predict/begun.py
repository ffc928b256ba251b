"""A forecast on its way: begun, while the device may still work on what the model says; made, until it is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridtrainer.predict.blend import softmax
from hybridtrainer.predict.curves import Array, Experts
from hybridtrainer.tree import Tree


class Begun(NamedTuple):
    """A forecast of which the model's part may not be known.

    Attributes:
        tick: Its number in the replay.
        clock: When it was begun.
        experts: The simple forecasts.
        weights: What each counts.
        blended: The blend of them.
        scale: Of its error.
        told: Waits for what the model says, the parts of a `Correction`; None without a model.
        recalled: Waits for what came of ticks like this one, in scales; None where that is not asked.
    """

    tick: int
    clock: int
    experts: Experts
    weights: Array
    blended: Array
    scale: Array
    told: Callable[[], tuple[Tensor, ...]] | None
    recalled: Callable[[], tuple[Tensor, ...]] | None = None


class Pending(NamedTuple):
    """A forecast for one horizon whose target has not been reached.

    Attributes:
        tick: Its number in the replay.
        clock: When it was begun.
        horizon: By number.
        experts: The simple forecasts.
        blended: The blend of them.
        corrected: What the model makes of it.
        recalled: What came of ticks like this one makes of it.
        loss: What was forecast.
        plain_scale: Of the blend's error.
        scale: Of the error.
        spread: Of single losses.
    """

    tick: int
    clock: int
    horizon: int
    experts: Array
    blended: float
    corrected: float
    recalled: float
    loss: float
    plain_scale: float
    scale: float
    spread: float

    def state(self) -> list[Tree]:
        """For a checkpoint."""
        return [torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in self]

    @classmethod
    def of(cls, state: Sequence[Tree]) -> Pending:
        """What `state` returned."""
        told: list[Any] = [each.numpy().copy() if isinstance(each, Tensor) else each for each in state]
        return cls(*told)


def on_its_way(parts: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Has tensors copied to the host; who calls the result waits until they are there, and for nothing else."""
    if not parts[0].is_cuda:
        return lambda: tuple(parts)
    copies = tuple(torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts)
    for copy, part in zip(copies, parts, strict=True):
        copy.copy_(part, non_blocking=True)
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record(torch.cuda.current_stream(parts[0].device))

    def arrived() -> tuple[Tensor, ...]:
        there.synchronize()
        return copies

    return arrived


def corrected(begun: Begun) -> tuple[Array, Array, float]:
    """What the members say on average, the scale of its error with how far they are apart, and the gain of a jump."""
    assert begun.told is not None
    gates, wider, gain = (part.numpy().astype(np.float64) for part in begun.told())
    weights = softmax(np.log(np.maximum(begun.weights, 1e-12)) + gates)
    said = (weights * begun.experts.losses).sum(-1)  # (members, horizons)
    middle = said.mean(0)
    apart = ((said - middle) ** 2).mean(0)
    return middle, np.sqrt((begun.scale * np.exp(wider.mean(0))) ** 2 + apart), float(gain.mean())
