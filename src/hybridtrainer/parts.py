"""Dividing a batch into parts, and what each part counts in the mean: by samples, or by the targets that count.

A loss need not be a mean over samples. `find_weighing` looks: it compares the loss of a batch with those of its parts.
It knows no memory and no training step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hybridtrainer.losses import samples_in

IGNORED = -100  # the target that torch's cross-entropy and Hugging Face leave out of a mean
TOLERANCE = 1e-4
TOLERANCE_16_BIT = 2e-2
LEAST_LOSS = 1e-3  # below it a difference is measured against this

Weighing = Literal["samples", "targets", "next targets"]
WEIGHINGS: tuple[Weighing, ...] = ("samples", "targets", "next targets")
"""What a part counts by: its samples, its targets, or those with one before them, as in a decoder of Hugging Face."""


def divide(batch: Any, parts: int) -> list[Any] | str:
    """The batch in so many parts of nearly equal size, or fewer where it has fewer samples; or why that cannot be.

    Tensors, and lists of plain values, are divided along their first dimension. Views are made, not copies.

    >>> divide({"x": torch.arange(5), "scale": 2.0}, 2)
    [{'x': tensor([0, 1, 2]), 'scale': 2.0}, {'x': tensor([3, 4]), 'scale': 2.0}]
    >>> divide([torch.zeros(4), torch.zeros(3)], 2)
    'a tensor of 3 stands beside one of 4'
    """
    samples = samples_in(batch)
    size = math.ceil(samples / parts)
    try:
        return [_slice(batch, start, min(start + size, samples), samples) for start in range(0, samples, size)]
    except _Indivisible as why:
        return str(why)


class _Indivisible(Exception):  # noqa: N818
    pass


def _slice(value: Any, start: int, end: int, samples: int) -> Any:
    if isinstance(value, Tensor):
        if not value.dim():
            return value
        if len(value) != samples:
            raise _Indivisible(f"a tensor of {len(value)} stands beside one of {samples}")
        return value[start:end]
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, MutableMapping):
        part = copy.copy(value)  # some have attributes of their own, as those of Hugging Face
        for key, inner in value.items():
            part[key] = _slice(inner, start, end, samples)
        return part
    if isinstance(value, list | tuple):
        return _slice_sequence(value, start, end, samples)
    raise _Indivisible(f"it has a {type(value).__name__} in it")


def _slice_sequence(value: list[Any] | tuple[Any, ...], start: int, end: int, samples: int) -> Any:
    if value and all(isinstance(each, str | int | float) for each in value):
        if len(value) != samples:
            raise _Indivisible(f"{len(value)} values stand beside {samples} samples")
        return value[start:end]
    inner = [_slice(each, start, end, samples) for each in value]
    return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)


def shares(parts: Sequence[Any], weighing: Weighing) -> list[float]:
    """What each part counts in the mean over all of them; the sum is 1.

    >>> shares([torch.tensor([[5, -100, -100]]), torch.tensor([[5, 6, 7]])], "targets")
    [0.25, 0.75]
    """
    weights = [samples_in(part) for part in parts]
    targets = None if weighing == "samples" else _targets(parts)
    if targets is not None:
        counted = targets if weighing == "targets" else [each[..., 1:] for each in targets]
        found = [int(each.ne(IGNORED).sum()) for each in counted]
        weights = found if sum(found) else weights
    return [weight / sum(weights) for weight in weights]


def may_differ(parts: Sequence[Any]) -> bool:
    """Whether it makes a difference by what these parts are weighed."""
    first, *others = (shares(parts, weighing) for weighing in WEIGHINGS)
    return any(abs(a - b) > 1e-9 for other in others for a, b in zip(first, other, strict=True))


def find_weighing(
    batch: Any, parts: Sequence[Any], measure: Callable[[Any], float], tolerance: float
) -> Weighing | None:
    """By what the parts of a batch must be weighed for their losses to have the loss of the batch as their mean.

    Args:
        batch: The whole.
        parts: Of it.
        measure: The loss of a batch, without what is random in training.
        tolerance: Largest difference as a share of the loss.

    Returns:
        None where no weighing will do: the loss is a sum, or its samples are compared with each other.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> find_weighing(x, [x[:2], x[2:]], lambda x: float(x.mean()), TOLERANCE)
    'samples'
    >>> find_weighing(x, [x[:2], x[2:]], lambda x: float(x.sum()), TOLERANCE) is None
    True
    """
    whole, losses = measure(batch), [measure(part) for part in parts]
    best: tuple[float, Weighing] | None = None
    for weighing in WEIGHINGS:
        pairs = zip(shares(parts, weighing), losses, strict=True)
        error = abs(math.fsum(share * loss for share, loss in pairs if share) - whole)
        if error <= tolerance * max(abs(whole), LEAST_LOSS) and (best is None or error < best[0]):
            best = error, weighing
    return best[1] if best else None


def _targets(parts: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """Of each part the tensor in which some targets are left out; None where there is none."""
    same_place = zip(*(_tensors(part) for part in parts), strict=True)
    return next((each for each in same_place if any(map(_has_ignored, each))), None)


def _has_ignored(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and tensor.dtype in (torch.int64, torch.int32) and bool(tensor.eq(IGNORED).any())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, MutableMapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
