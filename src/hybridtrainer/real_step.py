"""A real step: forward, backward, check, update. A gradient that is not finite never reaches a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from hybridtrainer import ranks
from hybridtrainer.errors import DataError, ModelError
from hybridtrainer.losses import CheckedLoss
from hybridtrainer.replicas import Replicas
from hybridtrainer.state import Training
from hybridtrainer.weights import clip_gradients_, gradient_norm

FORWARD, BACKWARD = "the forward pass", "the backward pass"
NORM, UPDATE = "the gradient norm", "the update of the optimizer"

Part = tuple[Any, float]
"""Some samples of a micro-batch, and what their mean loss counts in its own; 1.0 for all of them."""


@dataclass(frozen=True)
class Outcome:
    """What a real step did.

    Attributes:
        loss: Mean loss of its micro-batches.
        norm: Global gradient norm before clipping.
        problem: Why the update was withheld: something was not finite. Empty when all was well.
        overflow: Whether the loss scaler withheld it, as it does now and then while it finds its scale.
    """

    loss: float
    norm: float
    problem: str
    overflow: bool


def micro_batches_of(batch: Any, accumulate: int) -> Sequence[Any]:
    """What one step consumes, as a list.

    Raises:
        DataError: if several micro-batches are needed and `batch` is not a list of that many.
    """
    if accumulate == 1:
        return [batch]
    is_one = isinstance(batch, tuple) and all(isinstance(part, Tensor) for part in batch)
    if is_one or not isinstance(batch, list | tuple) or len(batch) != accumulate:
        got = f"{len(batch)} of them" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
        got = "a tuple of tensors, which is one batch" if is_one else got
        raise DataError(
            f"step needs a list of {accumulate} micro-batches, as accumulate says; it got {got}.",
            "Pass that many batches in a list, or use `fit`, which gathers them.",
        )
    return batch


class RealStep:
    """Makes real steps with one training setup.

    Args:
        training: Model, optimizer and scaler.
        loss: The loss of a micro-batch.
        clip_norm: Largest global gradient norm; None does not clip.
        overlap: Whether DDP may average gradients while it computes them: no step will be made again.

    Attributes:
        doing: What it is about, or was when it failed: UPDATE from the moment at which weights may have changed.
        replicas: How the ranks of a distributed run come to the same update.
    """

    def __init__(self, training: Training, loss: CheckedLoss, clip_norm: float | None, overlap: bool = False) -> None:
        self.doing = ""
        self.replicas = Replicas(loss.model, overlap)
        self._training = training
        self._loss = loss
        self._clip_norm = clip_norm
        self._groups = len(training.optimizer.param_groups)
        owned = {id(parameter) for group in training.optimizer.param_groups for parameter in group["params"]}
        self._parameters = [parameter for parameter in training.model.parameters() if id(parameter) in owned]

    def __call__(
        self, micro_batches: Sequence[Any], before_forward: Callable[[Any], None], after_backward: Callable[[], None],
        parts_of: Callable[[Any], Iterable[Part]] | None = None,
    ) -> Outcome:  # fmt: skip
        """One optimizer step over the micro-batches, or none where a value was not finite.

        Args:
            micro_batches: What the step learns from.
            before_forward: Called with each of them.
            after_backward: Called when gradients are complete.
            parts_of: Divides a micro-batch; each is computed whole where it is left out.
        """
        self.doing = FORWARD
        optimizer, scaler = self._training.optimizer, self._training.scaler
        if len(optimizer.param_groups) != self._groups:
            raise ModelError(
                f"The optimizer had {self._groups} groups when the trainer was made, and has others now.",
                "Add groups first, then make the trainer.",
            )
        loss = self._backward(micro_batches, before_forward, parts_of or whole)
        self.doing = NORM
        if scaler is not None:
            scaler.unscale_(optimizer)
        after_backward()
        norm = gradient_norm(self._parameters)
        if self._clip_norm is not None and ranks.count() == 1:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, norm)
        # The only point at which the host waits for the device.
        loss_value, norm_value = torch.stack([loss.double(), norm.to(loss.device).double()]).tolist()
        if ranks.count() > 1:
            loss_value, norm_value = agreed(loss_value, norm_value)
            if self._clip_norm is not None:
                clip_gradients_(self._parameters, self._clip_norm, torch.full_like(norm, norm_value))
        outcome = judge(loss_value, norm_value, scaler)
        self.doing = UPDATE
        if not outcome.problem:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        self.replicas.share_buffers_()
        self.doing = ""
        return outcome

    def _backward(
        self, micro_batches: Sequence[Any], before_forward: Callable[[Any], None],
        parts_of: Callable[[Any], Iterable[Part]],
    ) -> Tensor:  # fmt: skip
        """The loss, with gradients that are those of all ranks."""
        divisor = self._loss.divisor(len(micro_batches))
        if ranks.count() == 1 or self.replicas.sharded:  # torch scatters gradients of shards in the pass itself
            return self._alone(micro_batches, before_forward, divisor, parts_of)
        if self.replicas.overlaps:
            return self._overlapped(micro_batches, before_forward)
        losses: list[Tensor] = []

        def alone() -> str:
            with self.replicas.alone():
                losses.append(self._alone(micro_batches, before_forward, divisor, parts_of))
            return self.replicas.presence(self._parameters)

        # Not before every rank has got this far: one that has run out of memory begins again, and all others with it.
        self.replicas.average_(self._parameters, ranks.together("backward pass", alone))
        return losses[0]

    def _alone(
        self, micro_batches: Sequence[Any], before_forward: Callable[[Any], None], divisor: int,
        parts_of: Callable[[Any], Iterable[Part]],
    ) -> Tensor:  # fmt: skip
        """The loss of this rank, with its gradients."""
        pass_over = self._loss.pass_over
        return backward(self._mean, micro_batches, before_forward, self._start, divisor, parts_of, pass_over)

    def _overlapped(self, micro_batches: Sequence[Any], before_forward: Callable[[Any], None]) -> Tensor:
        """The same, with gradients averaged by DDP while the last micro-batch is computed; nothing is divided."""
        divisor, total = self._loss.divisor(len(micro_batches)), None
        if len(micro_batches) > 1:
            with self.replicas.alone():
                total = backward(self._mean, micro_batches[:-1], before_forward, self._start, divisor)
        loss = backward(self._mean, micro_batches[-1:], before_forward, self._start, divisor)
        self.replicas.settle()
        return loss if total is None else total + loss

    def abandon(self) -> None:
        """Frees what a step that raised has left behind."""
        optimizer, scaler = self._training.optimizer, self._training.scaler
        optimizer.zero_grad(set_to_none=True)
        self._loss.begin_again()
        if scaler is not None:  # it would refuse to unscale twice before an update
            scaler._per_optimizer_states.pop(id(optimizer), None)

    def _mean(self, part: Any) -> Tensor:
        self.doing = FORWARD
        return self._loss.mean(part)

    def _start(self, loss: Tensor) -> None:
        self.doing = BACKWARD
        scaler = self._training.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]


def whole(micro_batch: Any) -> list[Part]:
    """A micro-batch that is not divided."""
    return [(micro_batch, 1.0)]


def backward(
    mean: Callable[[Any], Tensor],
    micro_batches: Sequence[Any],
    before_forward: Callable[[Any], None],
    start: Callable[[Tensor], None],
    divisor: int,
    parts_of: Callable[[Any], Iterable[Part]] = whole,
    pass_over: Callable[[Any], None] = lambda _: None,
) -> Tensor:
    """Forward and backward of each part of each micro-batch; `start` is given its share of the loss. Returns the sum.

    The loss of a micro-batch is divided by `divisor`, which makes it its share.

    A part that counts nothing is left out, and `pass_over` is told: the mean over no target is no number.
    """
    total: Tensor | None = None
    for micro_batch in micro_batches:
        before_forward(micro_batch)
        for part, share in parts_of(micro_batch):
            if not share:
                pass_over(part)
                continue
            loss = mean(part)
            if share != 1.0:
                loss = loss * share
            if divisor > 1:
                loss = loss / divisor
            start(loss)
            total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def agreed(loss: float, norm: float) -> tuple[float, float]:
    """The mean loss over all ranks and the largest norm, or one that is not finite: the same on every rank."""
    found = ranks.exchange("loss", [loss, norm])
    losses, norms = [each[0] for each in found], [each[1] for each in found]
    worst = max(norms) if all(map(math.isfinite, norms)) else next(n for n in norms if not math.isfinite(n))
    return sum(losses) / len(losses), worst


def judge(loss: float, norm: float, scaler: GradScaler | None) -> Outcome:
    """What a step with this loss and gradient norm amounts to."""
    if not math.isfinite(loss):
        return Outcome(loss, norm, f"loss is {loss}", overflow=False)
    if math.isfinite(norm):
        return Outcome(loss, norm, "", overflow=False)
    if scaler is not None and scaler.get_scale() >= 1:  # still finding its scale
        return Outcome(loss, norm, "", overflow=True)
    return Outcome(loss, norm, f"gradient norm is {norm}", overflow=False)
