"""What a Lightning module and trainer may ask for when HybridTrainer makes the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hybridtrainer.errors import ModelError
from hybridtrainer.integrations.optional import require
from hybridtrainer.memory.optimizer import StreamedOptimizer

MADE_ELSEWHERE = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
)
UNFOLLOWED = {
    "StochasticWeightAveraging": 'Leave it out, and set readout = "averaged".',
    "LearningRateFinder": "Find the rate without `HybridStrategy`, then train with it.",
    "BatchSizeFinder": "Leave it out: where memory runs out, batches are computed in parts, with the same samples.",
}
"""Callbacks that move the schedule, or train and go back, behind the back of who makes the steps."""


def require_possible(trainer: Any, strategy: Any) -> None:
    """Refuses what HybridTrainer cannot follow.

    Raises:
        ModelError: the first of it.
    """
    for what, remedy in _problems(trainer, strategy):
        raise ModelError(what, remedy)


def require_end(trainer: Any) -> None:
    """Refuses a run without an end, on which no schedule and no jump could be judged. Asked once its data is there.

    Raises:
        ModelError: if nobody knows how many steps it has.
    """
    if math.isinf(trainer.estimated_stepping_batches):
        raise ModelError(
            "Nobody knows how many steps the run has.", "Give max_steps, or max_epochs and data with a length."
        )


def _problems(trainer: Any, strategy: Any) -> Iterator[tuple[str, str]]:
    module = strategy.lightning_module
    pl = require("lightning.pytorch", "lightning")
    base = pl.LightningModule
    for name, remedy in UNFOLLOWED.items():
        if any(isinstance(callback, getattr(pl.callbacks, name)) for callback in trainer.callbacks):
            yield f"{name} changes the schedule or the run itself, which HybridTrainer cannot follow.", remedy
    if not module.automatic_optimization:
        yield "The module optimizes by hand.", "Set automatic_optimization, or use `HybridTrainer` in your own loop."
    for name in MADE_ELSEWHERE:
        if getattr(type(module), name) is not getattr(base, name):
            yield (
                f"The module has a {name} of its own, and HybridTrainer makes that part of a step.",
                "Leave it out, or use `HybridTrainer` in your own loop.",
            )
    if len(strategy.optimizers) != 1:
        yield f"The module has {len(strategy.optimizers)} optimizers.", "Give it one, with parameter groups."
    if any(isinstance(optimizer, StreamedOptimizer) for optimizer in strategy.optimizers):
        yield (
            "The model is streamed, and Lightning's checkpoints would hold it in memory a second time.",
            "Use `HybridTrainer.fit`, or the integration with Hugging Face's Trainer.",
        )
    configs = strategy.lr_scheduler_configs
    if len(configs) > 1:
        yield f"The module has {len(configs)} schedulers.", "Join them, for example with SequentialLR."
    for config in configs:
        if config.interval == "step" and (config.frequency != 1 or config.reduce_on_plateau):
            yield (
                "The scheduler is moved every few steps, or by a metric of a step, and jumps move it step by step.",
                'Give it interval "step" with frequency 1, or interval "epoch".',
            )
    if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm").rsplit(".")[-1].lower() != "norm":
        yield "Gradients are clipped by value, which HybridTrainer does not do.", "Clip them by norm."
