"""What is refused before Lightning trains."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from hybridtrainer.config_memory import MemoryConfig  # noqa: E402
from hybridtrainer.errors import ModelError  # noqa: E402
from hybridtrainer.integrations.lightning_checks import require_end, require_possible  # noqa: E402
from hybridtrainer.memory.stream import stream  # noqa: E402
from hybridtrainer.models.gpt import build_gpt  # noqa: E402

TRAINER: dict[str, Any] = {"gradient_clip_val": None, "gradient_clip_algorithm": None, "callbacks": []}


class ByHand(pl.LightningModule):  # type: ignore[misc, name-defined]
    automatic_optimization = False


class OwnClipping(pl.LightningModule):  # type: ignore[misc, name-defined]
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


def check(trainer: dict[str, Any] | None = None, **changes: Any) -> None:
    usual = {
        "lightning_module": pl.LightningModule(),
        "optimizers": [torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)],
        "lr_scheduler_configs": [],
    }
    require_possible(SimpleNamespace(**(TRAINER | (trainer or {}))), SimpleNamespace(**(usual | changes)))


def schedule(interval: str, frequency: int = 1, plateau: bool = False) -> Any:
    return SimpleNamespace(interval=interval, frequency=frequency, reduce_on_plateau=plateau)


def test_usual_modules_pass():
    check()
    check({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"}, lr_scheduler_configs=[schedule("step")])
    check(lr_scheduler_configs=[schedule("epoch", 3, plateau=True)])


@pytest.mark.parametrize(
    ("trainer", "changes", "words"),
    [
        ({}, {"lightning_module": ByHand()}, "optimizes by hand"),
        ({}, {"lightning_module": OwnClipping()}, "a configure_gradient_clipping of its own"),
        ({}, {"optimizers": []}, "0 optimizers"),
        ({}, {"lr_scheduler_configs": [schedule("step"), schedule("step")]}, "2 schedulers"),
        ({}, {"lr_scheduler_configs": [schedule("step", 2)]}, "every few steps"),
        ({}, {"lr_scheduler_configs": [schedule("step", plateau=True)]}, "every few steps"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, {}, "clipped by value"),
        ({"callbacks": [pl.callbacks.StochasticWeightAveraging(0.1)]}, {}, 'readout = "averaged"'),
        ({"callbacks": [pl.callbacks.LearningRateFinder()]}, {}, "without `HybridStrategy`"),
        ({"callbacks": [pl.callbacks.BatchSizeFinder()]}, {}, "computed in parts"),
    ],
)
def test_what_cannot_be_followed_is_refused(trainer, changes, words):
    with pytest.raises(ModelError, match=words):
        check(trainer, **changes)


def test_a_run_without_an_end_is_refused():
    require_end(SimpleNamespace(estimated_stepping_batches=10))
    with pytest.raises(ModelError, match="how many steps"):
        require_end(SimpleNamespace(estimated_stepping_batches=math.inf))


def test_a_streamed_model_is_refused():
    model = stream(build_gpt("nano"), MemoryConfig(mode="split8"), "cpu")
    with pytest.raises(ModelError, match="a second time"):
        check(optimizers=[model.optimizer])
