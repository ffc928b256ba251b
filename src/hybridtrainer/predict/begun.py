"""A forecast that has begun: what the model says of it may still be on its way from the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtrainer.predict.curves import Experts


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
    weights: Tensor
    blended: Tensor
    scale: Tensor
    told: Callable[[], tuple[Tensor, ...]] | None
    recalled: Callable[[], tuple[Tensor, ...]] | None = None


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


def corrected(begun: Begun) -> tuple[Tensor, Tensor, float]:
    """What the members say on average, the scale of its error with how far they are apart, and the gain of a jump."""
    assert begun.told is not None
    gates, wider, gain = (part.double() for part in begun.told())
    weights = torch.softmax(begun.weights.clamp(min=1e-12).log() + gates, -1)
    said = (weights * begun.experts.losses).sum(-1)  # (members, horizons)
    apart = (said - said.mean(0)).square().mean(0)
    return said.mean(0), ((begun.scale * wider.mean(0).exp()).square() + apart).sqrt(), gain.mean().item()
