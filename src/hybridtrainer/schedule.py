"""The learning-rate clock: advanced step by step, and looked ahead on without moving it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hybridtrainer.tree import pack, unpack

FAR_AHEAD = 10_000  # steps looked ahead where nobody has said when the run ends
FARTHEST = 1_000_000  # steps looked ahead at most: some seconds


def learning_rates(optimizer: Optimizer) -> list[float]:
    """The present rate of each group of the optimizer."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def advance(scheduler: Any | None, steps: int, loss: float) -> None:
    """Moves the scheduler on by `steps`; one that watches the loss is shown it once."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    elif scheduler is not None:
        for _ in range(steps):
            scheduler.step()


def look_ahead(optimizer: Optimizer, scheduler: Any | None, steps: int) -> list[float] | None:
    """Sum of the learning rate over the next `steps`, for each group; None where the schedule ends before.

    Without a scheduler, or with one that waits for losses, the rate stays.
    """
    totals = [0.0] * len(optimizer.param_groups)
    try:
        for rates in _rates_ahead(optimizer, scheduler, steps):
            totals = [total + rate for total, rate in zip(totals, rates, strict=True)]
    except ValueError:  # torch's one-cycle schedule refuses to go beyond its end
        return None
    return totals


def rates_ahead(optimizer: Optimizer, scheduler: Any | None, steps: int) -> list[float]:
    """The rate of the first group at each of the next `steps`; the last one stays where the schedule ends before."""
    found: list[float] = []
    with suppress(ValueError):
        for rates in _rates_ahead(optimizer, scheduler, steps):
            found.append(rates[0])
    return [*found, *[(found or learning_rates(optimizer))[-1]] * (steps - len(found))]


def share_left(optimizer: Optimizer, scheduler: Any | None, steps: int) -> float:
    """The lowest rate after the highest of the next `steps`, over the highest, in the group that falls most."""
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return 1.0
    highest, lowest = learning_rates(optimizer), learning_rates(optimizer)
    with suppress(ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects a step of the optimizer first
        for rates in _rates_ahead(optimizer, scheduler, min(steps, FARTHEST)):
            for group, rate in enumerate(rates):
                is_peak = rate >= highest[group]
                highest[group] = max(rate, highest[group])
                lowest[group] = rate if is_peak else min(rate, lowest[group])
    return min((low / peak for low, peak in zip(lowest, highest, strict=True) if peak > 0), default=1.0)


def _rates_ahead(optimizer: Optimizer, scheduler: Any | None, steps: int) -> Iterator[list[float]]:
    """The rates of the next `steps`, each group's. The scheduler is run ahead and put back in the end."""
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        yield from repeat(learning_rates(optimizer), steps)
        return
    tensors, document = pack(scheduler.state_dict())
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    before = [_copied(group["lr"]) for group in optimizer.param_groups]
    others = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
    try:
        for _ in range(steps):
            yield learning_rates(optimizer)
            scheduler.step()
    finally:
        scheduler.load_state_dict(unpack(document, saved.__getitem__))
        for group, rate, values in zip(optimizer.param_groups, before, others, strict=True):
            group.update(values)
            if isinstance(group["lr"], Tensor) and isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate


def _copied(rate: float | Tensor) -> float | Tensor:
    return rate.clone() if isinstance(rate, Tensor) else rate


def crossed(before: int, after: int, interval: int) -> bool:
    """Whether a clock has come to a multiple of `interval`, or past one, as a jump may bring it.

    >>> crossed(99, 100, 100), crossed(98, 103, 100), crossed(100, 101, 100)
    (True, True, False)
    """
    return before // interval != after // interval
