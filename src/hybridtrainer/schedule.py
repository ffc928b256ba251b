"""The learning-rate clock: advanced step by step, and looked ahead on without moving it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hybridtrainer.tree import pack, unpack


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

    The scheduler is run ahead and put back. Without one, or with one that waits for losses, the rate stays.
    """
    rates = learning_rates(optimizer)
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return [rate * steps for rate in rates]
    tensors, document = pack(scheduler.state_dict())
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    before = [_copied(group["lr"]) for group in optimizer.param_groups]
    others = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
    totals = [0.0] * len(rates)
    try:
        for _ in range(steps):
            totals = [total + rate for total, rate in zip(totals, learning_rates(optimizer), strict=True)]
            scheduler.step()
    except ValueError:  # torch's one-cycle schedule refuses to go beyond its end
        return None
    finally:
        scheduler.load_state_dict(unpack(document, saved.__getitem__))
        for group, rate, values in zip(optimizer.param_groups, before, others, strict=True):
            group.update(values)
            if isinstance(group["lr"], Tensor) and isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
    return totals


def _copied(rate: float | Tensor) -> float | Tensor:
    return rate.clone() if isinstance(rate, Tensor) else rate
