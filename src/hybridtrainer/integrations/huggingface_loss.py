"""The loss that Hugging Face's Trainer computes, with its own normalization over the micro-batches of a step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.records import StepResult


class StepLoss:
    """The host's loss as HybridTrainer calls it.

    Args:
        host: A `transformers.Trainer`.
        model: As Accelerate has prepared it.

    Attributes:
        is_share: Whether it is normalized by the targets of the whole step, so that micro-batches are added up.
        parts_add: The same, for parts of them.
    """

    def __init__(self, host: Any, model: nn.Module) -> None:
        self._host, self._model = host, model
        self.is_share = self.parts_add = False
        self._items: Any = None
        self._seen: list[Tensor] = []

    def begin(self, items: Any) -> None:
        """A step begins, with so many targets in it; None where nobody has counted."""
        host, self._items, self._seen = self._host, items, []
        self.is_share = (host.model_accepts_loss_kwargs and items is not None) or host.compute_loss_func is not None
        if host.loss_is_scaled_for_ga is not None:
            self.is_share = host.loss_is_scaled_for_ga
        self.parts_add = self.is_share and items is not None

    def __call__(self, model: nn.Module, batch: Any, /) -> Tensor:  # noqa: ARG002  # the host has one around it
        """The loss of a micro-batch: its share of the step's while gradients are taken, its mean otherwise."""
        host, learns = self._host, torch.is_grad_enabled()
        inputs = host._prepare_inputs(copy.copy(batch))  # hosts take labels out of what they are given
        with host.compute_loss_context_manager():
            items = self._items if learns else host._get_num_items_in_batch([inputs], host.args.device)
            loss: Tensor = host.compute_loss(self._model, inputs, num_items_in_batch=items)
        if learns:
            self._seen.append(loss.detach())
        return loss

    def alone(self, batch: Any, items: Any, count: int) -> Tensor:
        """What the host reports for one of so many micro-batches of which no step is made: nothing is learned."""
        self.begin(items)
        with torch.no_grad(), self._host.compute_loss_context_manager():
            inputs = self._host._prepare_inputs(copy.copy(batch))
            loss: Tensor = self._host.compute_loss(self._model, inputs, num_items_in_batch=items)
        return loss if self.is_share else loss / count

    def report(self, result: StepResult, count: int) -> Tensor:
        """Reports the losses of all micro-batches of a step but the last, as the host would have; returns that one."""
        host, losses = self._host, self.by_micro_batch(result, count)
        for loss in losses[:-1]:
            if host.args.logging_nan_inf_filter and not torch.isfinite(loss):
                host._tr_loss += host._tr_loss / (1 + host.state.global_step - host._globalstep_last_logged)
            else:
                host._tr_loss += loss
        return losses[-1]

    def by_micro_batch(self, result: StepResult, count: int) -> list[Tensor]:
        """What is reported for each micro-batch; their sum is the loss of the step."""
        if len(self._seen) == count and not result.predicted:
            return self._seen if self.is_share else [loss / count for loss in self._seen]
        even = torch.tensor(result.loss / count, device=self._host.args.device)
        return [even] * count
