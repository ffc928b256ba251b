"""A module's `training_step` as a loss function."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from hybridtrainer.errors import LossError  # noqa: E402
from hybridtrainer.integrations import lightning_loss  # noqa: E402
from hybridtrainer.integrations.lightning_loss import StepLoss  # noqa: E402


class Module(torch.nn.Module):
    """Logs what it computes, as a Lightning module does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.logged: list[float] = []

    def log(self, _name: str, value: Any) -> None:
        self.logged.append(float(value.detach()))

    def training_step(self, batch: Any) -> Any:
        if batch is None:
            return None
        loss = self.weight * batch
        self.log("loss", loss)
        return {"loss": loss, "kept": loss * 2}


@pytest.fixture
def step_loss(monkeypatch):
    monkeypatch.setattr(lightning_loss.call, "_call_callback_hooks", lambda *_: None)
    monkeypatch.setattr(lightning_loss.call, "_call_lightning_module_hook", lambda *_: None)
    strategy = SimpleNamespace(
        precision_plugin=SimpleNamespace(train_step_context=nullcontext), root_device=torch.device("cpu")
    )
    return StepLoss(strategy, SimpleNamespace(accumulate_grad_batches=4))


def test_what_learns_is_a_share_and_is_logged_and_a_probe_is_neither(step_loss):
    module = Module()
    step_loss.begin()
    assert float(step_loss(module, (3.0,)).detach()) == 6.0 / 4
    with torch.no_grad():
        assert float(step_loss(module, (5.0,))) == 10.0
    assert module.logged == [6.0]
    told = step_loss.output(SimpleNamespace(predicted=False, loss=0.0))
    assert float(told["kept"]) == 12.0 and not told["kept"].requires_grad
    assert float(step_loss.output(SimpleNamespace(predicted=True, loss=7.0))) == 7.0


def test_no_loss_is_refused(step_loss):
    with pytest.raises(LossError, match="training_step returned None"):
        step_loss(Module(), (None,))
