"""Small comparisons on the digits, with a clock that tests drive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridtrainer.compare.arms import Arm
from hybridtrainer.config import RunConfig
from hybridtrainer.config_io import parse_config
from hybridtrainer.tasks import Task, build_task

STEPS = 60


def config(**more: Any) -> RunConfig:
    """A run on the digits that learns something in 60 steps."""
    return parse_config(
        {
            "predict": "off",
            "model": {"name": "cnn-small"},
            "data": {"source": "digits", "validation_share": 0.2},
            "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
            "schedule": {"warmup_steps": 0},
            "train": {"steps": STEPS, "batch_size": 16, "eval_interval": 2, "eval_batches": 2},
            "save_interval": 20,
            **more,
        }
    )


def arm(name: str, role: Any = "challenger", **more: Any) -> Arm:
    return Arm(name, role, config(**more))


class Clock:
    """Time moves when a step is made, by what its arm costs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("hybridtrainer.fit.time.perf_counter", lambda: self.now)

    def build(self, cost: Callable[[RunConfig], float] = lambda config: 1.0) -> Callable[[RunConfig], Task]:
        """Like `build_task`, but a step takes as long as `cost` says of its configuration."""

        def built(config: RunConfig) -> Task:
            torch.set_num_threads(1)
            task = build_task(config)
            step = task.trainer.step

            def slow_step(batch: Any) -> Any:
                self.now += cost(config)
                return step(batch)

            task.trainer.step = slow_step  # type: ignore[method-assign]
            return task

        return built


def less_accurate(task: Task, share: float) -> Task:
    """The same run, but of its right answers a share is counted as wrong."""
    honest = task.metrics["accuracy"]
    return replace(task, metrics={"accuracy": lambda model, batch: honest(model, batch) * (1 - share)})
