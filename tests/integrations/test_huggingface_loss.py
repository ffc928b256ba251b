"""The loss of a step as Hugging Face normalizes it: over all targets of its micro-batches, or by their number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.integrations.huggingface_loss import StepLoss
from hybridtrainer.records import Phase, StepResult


class Host:
    """Computes a sum of squares over the number of targets, and takes the labels out as some hosts do."""

    model_accepts_loss_kwargs, compute_loss_func, loss_is_scaled_for_ga = True, None, None
    args = SimpleNamespace(device="cpu")

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def compute_loss_context_manager(self) -> Any:
        return torch.autocast("cpu", enabled=False)

    def _get_num_items_in_batch(self, batches: Any, device: Any) -> Any:
        return sum(batch["labels"].numel() for batch in batches)

    def compute_loss(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
        errors: Tensor = model(inputs["x"]) - inputs.pop("labels")
        loss: Tensor = errors.square().sum() / num_items_in_batch
        return loss


def batch(rows: int) -> dict[str, Tensor]:
    return {"x": torch.ones(rows, 2), "labels": torch.zeros(rows, 1)}


def result(loss: float, predicted: int = 0) -> StepResult:
    return StepResult(1, Phase.FULL, loss, predicted, None, 0.0, "")


def test_with_gradients_it_is_a_share_of_the_step_and_without_a_mean():
    model = nn.Linear(2, 1)
    loss = StepLoss(Host(), model)
    loss.begin(torch.tensor(6))
    assert (loss.is_share, loss.parts_add) == (True, True)
    given = batch(2)
    share = loss(model, given)
    assert "labels" in given
    with torch.no_grad():
        mean = loss(model, given)
    assert share.item() == pytest.approx(mean.item() / 3)
    assert [each.item() for each in loss.by_micro_batch(result(9.0), 1)] == [share.item()]


def test_losses_that_nobody_has_normalized_are_divided_by_their_number():
    host, model = Host(), nn.Linear(2, 1)
    host.loss_is_scaled_for_ga = False  # type: ignore[assignment]
    loss = StepLoss(host, model)
    loss.begin(torch.tensor(2))
    assert not loss.is_share
    seen = [loss(model, batch(2)).item(), loss(model, batch(2)).item()]
    assert [each.item() for each in loss.by_micro_batch(result(1.0), 2)] == [each / 2 for each in seen]


def test_a_jump_is_told_as_its_probe():
    loss = StepLoss(Host(), nn.Linear(2, 1))
    loss.begin(torch.tensor(6))
    assert [each.item() for each in loss.by_micro_batch(result(3.0, predicted=5), 2)] == [1.5, 1.5]


def test_losses_are_reported_one_by_one_as_the_host_reports_them():
    host = Host()
    host.args = SimpleNamespace(device="cpu", logging_nan_inf_filter=True)
    host.state, host._globalstep_last_logged, host._tr_loss = SimpleNamespace(global_step=3), 0, torch.tensor(8.0)  # type: ignore[attr-defined]
    loss = StepLoss(host, nn.Linear(2, 1))
    loss.begin(torch.tensor(6))
    loss._seen = [torch.tensor(2.0), torch.tensor(float("nan")), torch.tensor(5.0)]
    assert loss.report(result(1.0), 3).item() == 5.0
    assert host._tr_loss.item() == 10 + 10 / 4  # type: ignore[attr-defined]  # the mean so far stands for what is none


def test_a_micro_batch_without_a_step_is_looked_at_and_teaches_nothing():
    model = nn.Linear(2, 1)
    loss = StepLoss(Host(), model)
    found = loss.alone(batch(2), torch.tensor(6), 2)
    loss.begin(torch.tensor(6))
    assert not found.requires_grad and found.item() == loss(model, batch(2)).item()
