"""A real step of a streamed model: the update is made in the backward pass, block by block, or decided at its end.

A loss that is not finite lets no block be updated. A gradient that is not finite stops the update from its block on;
with `memory.clipping = "exact"` such a step leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridtrainer import ranks
from hybridtrainer.buffer_guard import BufferGuard
from hybridtrainer.losses import CheckedLoss
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.post_mortem import OUTSIDE_THE_BLOCKS, explained
from hybridtrainer.phases import horizon
from hybridtrainer.randomness import RandomState
from hybridtrainer.real_step import Outcome, agreed, backward, judge
from hybridtrainer.smaller_step import SmallerStep
from hybridtrainer.state import Training
from hybridtrainer.tree import Tree


def make_real_step(
    training: Training, loss: CheckedLoss, clip_norm: float | None, guard: BufferGuard, retry_smaller: bool,
    say: Callable[[str], object],
) -> SmallerStep | StreamedStep:  # fmt: skip
    """What makes real steps with this setup."""
    if isinstance(training.optimizer, StreamedOptimizer):
        return StreamedStep(training.optimizer, loss, clip_norm)
    return SmallerStep(training, loss, clip_norm, guard, retry_smaller, say)


def where_weights_are(training: Training) -> horizon.Where:
    """What the cost of a jump depends on."""
    if not any(parameter.is_cuda for parameter in training.model.parameters()):
        return "cpu"
    return "streamed" if isinstance(training.optimizer, StreamedOptimizer) else "gpu"


class StreamedStep:
    """Makes real steps with a streamed model.

    Args:
        optimizer: The model's own.
        loss: The loss of a micro-batch.
        clip_norm: Largest global gradient norm; None leaves what `stream` was told.
    """

    def __init__(self, optimizer: StreamedOptimizer, loss: CheckedLoss, clip_norm: float | None) -> None:
        self._optimizer = optimizer
        self._loss = loss
        if clip_norm is not None:
            optimizer.updates.clip_norm = clip_norm

    def __call__(
        self, micro_batches: Sequence[Any], before_forward: Callable[[Any], None], after_backward: Callable[[], None],
        before: RandomState | None = None,  # noqa: ARG002  a resident step needs it
    ) -> Outcome:  # fmt: skip
        """One step over the micro-batches."""
        optimizer = self._optimizer
        with explained(OUTSIDE_THE_BLOCKS):
            divisor = self._loss.divisor(len(micro_batches))
            total = backward(self._loss.mean, micro_batches, before_forward, self._start, divisor)
        after_backward()
        norm = optimizer.gradient_norm()
        loss_value, norm_value = torch.stack([total.double(), norm.to(total.device).double()]).tolist()
        if ranks.count() > 1:
            loss_value, norm_value = agreed(loss_value, norm_value)
        outcome = judge(loss_value, norm_value, None)
        if outcome.problem:
            updated = optimizer.skip()
            if updated:
                problem = f"{outcome.problem}, seen when {updated} parts of the model had been updated with finite ones"
                outcome = replace(outcome, problem=problem)
        else:
            optimizer.step()
        optimizer.zero_grad()
        return outcome

    def _start(self, loss: Tensor) -> None:
        self._optimizer.updates.watch_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def abandon(self, error: BaseException) -> None:  # noqa: ARG002  other ranks wait for gradients, not for news
        """Frees what a step that raised has left behind. What it has updated stays so; see `TornStepError`."""
        self._optimizer.give_up()

    def require_whole(self) -> None:
        """The engine looks for itself."""

    def torn_by_error(self, where: Callable[[], bool] = bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """The engine knows what it has updated."""
        return nullcontext()

    def state(self) -> Tree:
        """None of its own: the engine divides inside a block, and the model knows itself whether it is whole."""
        return None

    def restore(self, state: Tree) -> None:
        """There is nothing to put back."""
