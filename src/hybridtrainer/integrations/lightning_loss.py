"""The loss that a Lightning module computes in `training_step`, with Lightning's precision, hooks and logging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.errors import LossError
from hybridtrainer.integrations.optional import require
from hybridtrainer.records import StepResult

call = require("lightning.pytorch.trainer.call", "lightning")


class StepLoss:
    """The module's `training_step` as HybridTrainer calls it.

    Args:
        strategy: Lightning's, whose precision is used.
        trainer: Lightning's.
    """

    is_share = True  # Lightning divides by `accumulate_grad_batches`, even where the data ends before

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self._output: Any = None

    def begin(self) -> None:
        """A step begins."""
        self._output = None

    def __call__(self, model: nn.Module, batch: Any, /) -> Tensor:
        """The loss of a micro-batch: its share of the step's while gradients are taken, its own otherwise."""
        learns = torch.is_grad_enabled()
        with self._strategy.precision_plugin.train_step_context(), _silent(model, not learns):
            output = model.training_step(*batch)  # type: ignore[operator]
        if output is None:
            raise LossError(
                "training_step returned None, which leaves a batch out, and here every batch makes a step.",
                "Leave such batches out of the data, or return a loss of 0 that depends on the weights.",
            )
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        if learns and isinstance(loss, Tensor):
            self._output = _detached(output)
            loss = loss / self._trainer.accumulate_grad_batches
            call._call_callback_hooks(self._trainer, "on_before_backward", loss)
            call._call_lightning_module_hook(self._trainer, "on_before_backward", loss)
        return loss

    def output(self, result: StepResult) -> Any:
        """What Lightning is told that `training_step` returned."""
        if self._output is None or result.predicted:
            return torch.tensor(result.loss, device=self._strategy.root_device)
        return self._output


@contextmanager
def _silent(module: nn.Module, on: bool) -> Iterator[None]:
    """What a probe logs is nothing that has happened in training."""
    names = ("log", "log_dict") if on else ()
    for name in names:
        module.__dict__[name] = lambda *_, **__: None
    try:
        yield
    finally:
        for name in names:
            del module.__dict__[name]


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in output.items()}
