"""HybridTrainer for a loop with Hugging Face's Accelerate: what `prepare` has wrapped is what it is given.

Precision and placement stay Accelerate's; the loop, its data and its checkpoints are the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.integrations.clock import HostScheduler, noticed
from hybridtrainer.losses import LossFunction
from hybridtrainer.trainer import HybridTrainer


def from_accelerate(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    loss_fn: LossFunction,
    config: HybridTrainerConfig | None = None,
    scheduler: Any | None = None,
    hooks: Iterable[object] = (),
    **options: Any,
) -> HybridTrainer:
    """A `HybridTrainer` that takes the place of `accelerator.backward`, clipping and the steps of the other two.

    Args:
        accelerator: An `accelerate.Accelerator`. Its mixed precision and loss scaling are used.
        model: As `accelerator.prepare` returned it.
        optimizer: Likewise.
        loss_fn: As for `HybridTrainer`. With gradient accumulation `step` takes a list of micro-batches.
        config: Settings; the defaults where left out.
        scheduler: As `prepare` returned it, or one that was not prepared.
        hooks: As for `HybridTrainer`.
        options: Further ones of `HybridTrainer`, such as `clip_norm` and `probe_batches`.

    Raises:
        ModelError: if there are several processes, or the settings name a precision of their own.
    """
    config = config or HybridTrainerConfig()
    if accelerator.num_processes > 1:
        raise ModelError(
            f"There are {accelerator.num_processes} processes, and decisions of the phases are made for one.",
            "Launch one process.",
        )
    if config.memory.precision != "fp32":
        raise ModelError(
            f'memory.precision is "{config.memory.precision}", and here Accelerate chooses the precision.',
            "Leave it out, and set mixed_precision of the Accelerator.",
        )
    scaler, clock = accelerator.scaler, None
    inner = getattr(optimizer, "optimizer", optimizer)
    if scheduler is not None:
        clock = HostScheduler(getattr(scheduler, "scheduler", scheduler), scaler=noticed(scaler, inner))
    watched = [] if scaler is None or clock is None else [_Watch(clock)]
    options.setdefault("accumulate", accelerator.gradient_accumulation_steps)
    return HybridTrainer(
        model, inner, loss_fn, config, scheduler=clock, scaler=scaler, hooks=[*watched, *hooks], **options
    )


class _Watch:
    """Lets the schedule see the loss scale before each step."""

    def __init__(self, clock: HostScheduler) -> None:
        self._clock = clock

    def before_step(self, _trainer: HybridTrainer, _batch: Any) -> None:
        self._clock.before_step()
