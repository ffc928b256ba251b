"""Whether a batch can be divided along its first dimension: tried on two samples, once for each kind of call.

The first dimension may be time, and a tensor may have as many heads as there are samples: parts computed alone would
then be another result, or none. This module knows nothing of chunks and memory: it is told how to run the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.calls import Call, divided

Run = Callable[[Sequence[Tensor]], list[Tensor]]
ROUNDING = 1e-5  # relative; where samples go to experts, they add in another order
TF32 = 2.0**-10  # to how much its products round, where they are allowed: one kernel may use it and another not
REMEDY = (
    "The batch cannot be divided along its first dimension: use `memory.split = 1`, with smaller batches and "
    "`accumulate` if they do not fit."
)


class Division:
    """What is known of the calls of a model's blocks; they are alike, so that one answers for all."""

    def __init__(self) -> None:
        self._divisible: list[Any] = []

    def require(self, block: nn.Module, call: Call, tensors: Sequence[Tensor], run: Run, epsilon: float) -> None:
        """Refuses to divide what is not the same in parts.

        Random numbers, buffers and modes are afterwards as they were. Where two samples do not fit, or are the same,
        nothing is found out, and the next call is tried.

        Args:
            run: The block's result for such tensors, without a graph.
            epsilon: To how much a number of the coarsest type is rounded.

        Raises:
            ModelError: if a sample's result depends on the other sample, on how many there are, or does not exist.
        """
        kind = (call.spec, divided(tensors), [tensor.dim() for tensor in tensors])
        if kind in self._divisible:
            return
        if torch.get_float32_matmul_precision() != "highest":
            epsilon = max(epsilon, TF32)
        try:
            with torch.no_grad(), _evaluated(block):
                is_sure = _try(tensors, run, epsilon)
        except torch.OutOfMemoryError:
            return
        if is_sure:
            self._divisible.append(kind)


def require_samples(outputs: Sequence[Tensor], samples: int) -> None:
    """Refuses a result that is not one of each sample."""
    for output in outputs:
        if not output.dim() or output.shape[0] != samples:
            raise ModelError(
                f"A block returns a tensor of {tuple(output.shape)} for {samples} samples: what is no result of each "
                "sample cannot be put together from parts of a batch.",
                "Use `memory.split = 1` with this model.",
            )


def _try(tensors: Sequence[Tensor], run: Run, epsilon: float) -> bool:
    """Runs the first and the last sample beside each other, beside themselves and beside their mean, and alone.

    In runs of the same shapes the same kernels round alike, so that beside another sample a result differs by what it
    has of that sample; the mean is like both, in case that only what is alike is looked at. Returns whether anything
    could be seen: not where both samples are the same.
    """
    last = len(tensors[0]) - 1
    for index, row in enumerate((0, last)):

        def beside(other: int | None, index: int = index, row: int = row) -> list[Tensor]:
            rows = [other, other]
            rows[index] = row
            return [output[index] for output in _results(tensors, run, rows)]

        expected = beside(row)
        alone = [output[0] for output in _results(tensors, run, [row])]
        mixed = any(_differ(beside(other), expected, max(epsilon, ROUNDING)) for other in (last - row, None))
        if mixed or _differ(alone, expected, 4 * max(epsilon, 10 * ROUNDING)):
            raise ModelError("A block computes another result for a sample where others are not beside it.", REMEDY)
    flags = divided(tensors)
    return any(not torch.equal(each[0], each[last]) for each, flag in zip(tensors, flags, strict=True) if flag)


def _results(tensors: Sequence[Tensor], run: Run, rows: Sequence[int | None]) -> list[Tensor]:
    device = tensors[0].device
    flags = divided(tensors)
    chosen = [
        torch.cat([_sample(tensor, row) for row in rows]) if flag else tensor
        for tensor, flag in zip(tensors, flags, strict=True)
    ]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            outputs = run(chosen)
        except (torch.OutOfMemoryError, ModelError):
            raise
        except Exception as error:
            raise ModelError(
                f"A block cannot compute {len(rows)} of {len(tensors[0])} samples alone: {type(error).__name__}: "
                f"{error}.",
                REMEDY,
            ) from error
    require_samples(outputs, len(rows))
    return outputs


def _sample(tensor: Tensor, row: int | None) -> Tensor:
    """One sample, or the mean of the first and the last."""
    if row is not None:
        return tensor[row : row + 1]
    return 0.5 * tensor[:1] + 0.5 * tensor[-1:] if tensor.is_floating_point() else tensor[-1:]


def _differ(found: Sequence[Tensor], expected: Sequence[Tensor], rounding: float) -> bool:
    """Whether results differ on average by more than rounding; by the mean of sizes, as few may be huge."""
    for one, other in zip(found, expected, strict=True):
        if other.is_floating_point():
            size = other.float().nan_to_num()
            if (one.float().nan_to_num() - size).abs().sum() > rounding * size.abs().sum():
                return True
    return False


@contextmanager
def _evaluated(block: nn.Module) -> Iterator[None]:
    """Inside, the block is in eval mode; afterwards its modes and buffers are as they were."""
    training = [module for module in block.modules() if module.training]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for module, name, buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
            module._buffers[name] = buffer
