"""What a `loss_fn` may return, and what happens when it returns something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybridtrainer.errors import LossError
from hybridtrainer.sample_weights import StepWeights


class LossFunction(Protocol):
    """The loss of a batch: a scalar, or one value for each sample."""

    def __call__(self, model: nn.Module, batch: Any, /) -> Tensor:
        """The loss of `batch`."""
        ...


def samples_in(batch: Any) -> int:
    """How many samples a batch has: the length of the first tensor in it; 1 where there is none.

    >>> samples_in({"images": torch.zeros(8, 3), "labels": torch.zeros(8)})
    8
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((samples_in(part) for part in parts if isinstance(part, Tensor | Mapping | list | tuple)), 1)


def tokens_in(batch: Any) -> int:
    """How many tokens a batch has: the elements of its largest matrix of whole numbers; 0 where there is none.

    >>> tokens_in({"input_ids": torch.zeros(8, 33, dtype=torch.long), "weights": torch.zeros(8, 64)})
    264
    >>> tokens_in((torch.zeros(8, 3, 28, 28), torch.zeros(8, dtype=torch.long)))
    0
    """
    if isinstance(batch, Tensor):
        is_text = batch.dim() == 2 and batch.dtype in (torch.int32, torch.int64)
        return batch.numel() if is_text else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return max(map(tokens_in, parts), default=0)


class CheckedLoss:
    """Calls the user's loss function under the chosen precision and checks what comes back.

    Args:
        model: Passed to the loss function.
        loss_fn: The user's own.
        precision: "fp32" runs it as it is; "bf16" and "fp16" run it under torch's autocast. A function is asked before
            every call.

    A loss function may have two attributes that say how its values make up a step of several micro-batches. Where
    `is_share` is true, what it returns while gradients are taken is the share of its micro-batch in the loss of the
    step: shares are added as they are, not divided by the number of micro-batches. Where `parts_add` is true besides,
    so do the shares of parts of a micro-batch. Without gradients it returns the mean over its batch either way.

    Attributes:
        model: As the user gave it.
        heard: Losses that backward passes have started from, as the function returned them, where somebody listens.
        weights: What each sample of the step counts in the loss that a backward pass starts from; None for all alike.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, precision: str | Callable[[], str]) -> None:
        self.model = model
        self._loss_fn = loss_fn
        self._precision_now: Callable[[], str] = (lambda: precision) if isinstance(precision, str) else precision
        self._device = next(model.parameters()).device.type
        self.heard: list[Tensor] | None = None
        self.weights: StepWeights | None = None

    def divisor(self, micro_batches: int) -> int:
        """What the loss of each of so many micro-batches is divided by."""
        return 1 if getattr(self._loss_fn, "is_share", False) else micro_batches

    @property
    def parts_add(self) -> bool:
        """Whether losses of parts of a micro-batch make up its own by addition."""
        return bool(getattr(self._loss_fn, "parts_add", False))

    @property
    def is_16_bit(self) -> bool:
        """Whether products are computed in 16 bits."""
        return self._precision_now() != "fp32"

    def values(self, batch: Any) -> Tensor:
        """The loss as the function returned it, scalar or one for each sample.

        Raises:
            LossError: if it is no tensor, no number, or of more than one dimension.
        """
        with self._precision():
            loss = self._loss_fn(self.model, batch)
        if not isinstance(loss, Tensor):
            raise LossError(
                f"loss_fn returned a {type(loss).__name__}.",
                "Return the loss as a tensor: a scalar, or one value for each sample.",
            )
        if loss.dim() > 1 or loss.numel() == 0:
            raise LossError(
                f"loss_fn returned a tensor of shape {tuple(loss.shape)}.",
                "Return a scalar, or a vector with one loss for each sample: take the mean over the other dimensions.",
            )
        if not loss.is_floating_point():
            raise LossError(f"loss_fn returned a tensor of {loss.dtype}.", "Return a floating-point loss.")
        return loss

    def mean(self, batch: Any) -> Tensor:
        """The loss as a scalar that a backward pass can start from.

        Raises:
            LossError: also if it does not depend on any trainable weight.
        """
        loss = self.values(batch)
        if not loss.requires_grad:
            raise LossError(
                "loss_fn returned a loss that depends on no trainable weight.",
                "Compute it from the model's output, outside `torch.no_grad()` and without `.detach()` or `.item()`.",
            )
        if self.heard is not None:
            self.heard.append(loss.detach())
        if self.weights is not None:
            loss = self.weights.weigh(loss, samples_in(batch))
        return loss.mean() if loss.dim() else loss

    def pass_over(self, part: Any) -> None:
        """A part of the step counts nothing and is not computed."""
        if self.weights is not None:
            self.weights.pass_over(samples_in(part))

    def begin_again(self) -> None:
        """Forgets what a pass has told that is given up."""
        if self.heard:
            self.heard.clear()
        if self.weights is not None:
            self.weights.begin_again()

    def _precision(self) -> AbstractContextManager[Any]:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self._precision_now())
        if dtype is None:
            return nullcontext()
        # The 16-bit copies of all weights would stay until the end; only a backward pass uses them again.
        return torch.autocast(self._device, dtype, cache_enabled=torch.is_grad_enabled())
