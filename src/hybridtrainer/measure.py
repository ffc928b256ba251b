"""Losses and metrics measured without leaving a trace: no gradient, no random number, no buffer is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hybridtrainer import ranks
from hybridtrainer.buffer_guard import BufferGuard
from hybridtrainer.errors import DataError, ModelError
from hybridtrainer.randomness import isolated_randomness
from hybridtrainer.replicas import is_sharded, reshard


def batches_of(batches: Iterable[Any] | None, name: str) -> list[Any] | None:
    """Batches as a list; None stays None.

    Args:
        name: Of the argument that they are.

    Raises:
        ModelError: if it is one batch, or no batches at all.
    """
    if batches is None:
        return None
    if isinstance(batches, tuple) and batches and all(isinstance(part, Tensor) for part in batches):
        raise ModelError(f"{name} is a tuple of tensors, which is one batch.", f"Give a list: {name}=[batch, ...].")
    if not isinstance(batches, Iterable):
        raise ModelError(f"{name} is a {type(batches).__name__}.", f"Give a list: {name}=[batch, ...].")
    return list(batches)


def measure(
    model: nn.Module,
    function: Callable[[Any], Tensor],
    batches: Iterable[Any],
    guard: BufferGuard,
    seed: int,
    *,
    batch_statistics: bool = False,
) -> list[list[float]]:
    """What `function` returns for each batch, as a list of values a batch.

    Args:
        model: Put into evaluation mode for the while.
        function: A loss or metric of one batch, a scalar or one value for each sample.
        batches: What to measure on.
        guard: Puts the buffers back afterwards.
        seed: Of whatever is random in the function; the same seed gives the same draws.
        batch_statistics: Let batch norms that are training use the batch's own statistics. At displaced weights
            the running ones are those of other weights.
    """
    guard.remember()
    with torch.no_grad(), isolated_randomness(seed), _evaluation_mode(model, batch_statistics):
        try:
            values = [function(batch).detach().double().reshape(-1) for batch in batches]
        except RuntimeError as error:
            named = ranks.named(error)  # shards are gathered in the pass, and a rank may have gone
            if named is error:
                raise
            raise named from error
        finally:
            reshard(model)
            guard.put_back()
    return [value.tolist() for value in values]


def evaluate(
    model: nn.Module, function: Callable[[Any], Tensor], batches: Iterable[Any], guard: BufferGuard, seed: int
) -> float:
    """Mean of all values: over batches where a batch gives one, over samples where each sample does.

    Several ranks give the mean over what all of them have measured, each on its own batches.
    """
    if ranks.count() > 1 and is_sharded(model):  # every pass is one of all ranks
        batches = list(batches)
        ranks.require_same("the number of batches to evaluate on", len(batches), "Give every rank as many.")
    found = ranks.together("evaluation", lambda: measure(model, function, batches, guard, seed))
    values = [value for each in found for batch in each for value in batch]
    if not values:
        raise DataError("There are no batches to evaluate on.", "Give at least one.")
    return fmean(values)


def wait_for_device(model: nn.Module) -> None:
    """Returns when the model's device has done all that it was told to."""
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _evaluation_mode(model: nn.Module, batch_statistics: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for module, training in modes:
        if batch_statistics and training and isinstance(module, _BatchNorm):
            module.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
