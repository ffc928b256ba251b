"""Is a jump credited with what it is worth? The same moment of a run with a jump and without, and what came of it.

python -m benchmarks.credit --tasks stdlib-gpt digits --seeds 2

A run is trained plainly, with windows of its weights. At some moments the jump that would be tried is probed as in a
run, and then made in one of two copies, which go on with the same batches. After 20 steps each is measured on held-out
batches at the mean of its last 10 weights, where a jump's noise is gone. How much lower the loss is with the jump,
over what a step of the plain run gains there, is what the jump was worth; what it is credited with is by the default
settings. Single moments are noise: gains are added up over a run, and a step's is that of the line through all moments.
The first steps, in which everything falls, are left out.
"""

from __future__ import annotations

import argparse
import copy
import os
from itertools import count, islice
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_io import load_config
from hybridtrainer.models.cnn import image_loss
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.phases import divergence, horizon, policy
from hybridtrainer.predict.probe import Comparison
from hybridtrainer.records import Phase
from hybridtrainer.tasks import Task, build_task

FIRST, EVERY, LAST = 220, 60, 700  # moments, in steps
REACH = 15  # steps that a jump foresees
AFTER, MEANT = 20, 10  # steps after it, and how many of them are averaged
HELD_OUT = 12  # batches
DATA = "HYBRIDTRAINER_TEST_DATA"
ACCEPTS = HybridTrainerConfig(confidence_threshold=0.0)
UNTRIED = policy.PolicyState(Phase.PREDICT, longest_jump=REACH)


class Case(NamedTuple):
    """A task at a constant rate."""

    task: str
    rate: float
    folder: str = ""
    model: str = ""


CASES: dict[str, Case] = {
    "stdlib-gpt": Case("stdlib-gpt", 2e-3),
    "stdlib-gpt-low": Case("stdlib-gpt", 3e-4),
    "digits": Case("digits", 2e-3),
    "fashion-mnist-small": Case("fashion-mnist-small", 6e-3, "fashion-mnist"),
    "fashion-mnist-low": Case("fashion-mnist-small", 1e-3, "fashion-mnist"),
    "mnist-small": Case("mnist", 3e-3, "mnist", "cnn-small"),
}


class Copies:
    """The model and optimizer of a task, put back as often as needed."""

    def __init__(self, task: Task) -> None:
        self.task, self.trainer = task, task.trainer
        self.model, self.optimizer = task.trainer.model, task.trainer.optimizer
        self._loss_fn = image_loss if task.config.model.name.startswith("cnn") else gpt_loss
        self._saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def back(self) -> None:
        """To where they were."""
        self.model.load_state_dict(self._saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self._saved[1]))

    def loss(self) -> float:
        """On held-out batches."""
        return self.trainer.evaluate(self.task.validation)

    def go_on(self, batches: list[Any], first: int) -> list[float]:
        """Trains plainly; from the `first` step on, the loss at the mean of the newest weights."""
        newest: list[list[Tensor]] = []
        losses = []
        for number, batch in enumerate(batches, 1):
            self._loss_fn(self.model, batch).mean().backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.config.train.clip_norm or torch.inf)
            self.optimizer.step()
            self.optimizer.zero_grad()
            newest = [*newest, [each.detach().clone() for each in self.model.parameters()]][-MEANT:]
            if number >= first:
                losses.append(self._at_the_mean(newest))
        return losses

    @torch.no_grad()
    def _at_the_mean(self, newest: list[list[Tensor]]) -> float:
        for weight, *values in zip(self.model.parameters(), *newest, strict=True):
            weight.copy_(torch.stack(values).mean(0))
        loss = self.loss()
        for weight, value in zip(self.model.parameters(), newest[-1], strict=True):
            weight.copy_(value)
        return loss


def moment(task: Task, following: list[Any]) -> dict[str, float] | None:
    """What a jump from here is credited with, and what it gains; None where there is no forecast."""
    trainer, jumps = task.trainer, task.trainer.jumps
    forecast, pace = jumps.forecast(REACH), divergence.pace(trainer._at.watch)
    if isinstance(forecast, str) or not pace:
        return None
    copies = Copies(task)
    verdict = jumps.try_out(forecast, task.validation, copies.back)
    assert isinstance(verdict, Comparison)
    credit = horizon.probed_worth(verdict, forecast.confidence, pace, REACH, UNTRIED, ACCEPTS).steps
    jumps.displace_(forecast)
    (with_it,) = copies.go_on(following[:AFTER], AFTER)
    copies.back()
    (without,) = copies.go_on(following[:AFTER], AFTER)
    copies.back()
    return {
        "confidence": forecast.confidence,
        "probed": verdict.gain,
        "credit": credit,
        "pace_taken": pace,
        "gained": without - with_it,
        "plain": without,
    }


def run(case: Case, seed: int) -> list[dict[str, float]]:
    """All moments of one run."""
    settings = [
        'schedule.name="constant"', f"optimizer.lr={case.rate}", f"seed={seed}", f"train.steps={LAST}",
        f"train.eval_batches={HELD_OUT}", 'preset="conservative"', 'predict=["jumps"]', "warmup_steps=0",
        "confidence_threshold=1.0",
    ]  # fmt: skip
    if case.model:
        settings.append(f'model.name="{case.model}"')
    if case.folder:
        settings.append(f'data.path="{os.environ[DATA]}/{case.folder}"')
    task = build_task(load_config(case.task, settings))
    batches = list(islice((batch for _ in count() for batch in task.loader), LAST + AFTER))
    found = []
    for step in range(1, LAST + 1):
        task.trainer.step(batches[step - 1])
        if step >= FIRST and (step - FIRST) % EVERY == 0:
            row = moment(task, batches[step:])
            if row is not None:
                found.append({"step": step} | row)
    return found


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of all moments of a task: steps that a jump was worth and was credited with, in the mean."""
    slope, _ = linear_regression([row["step"] for row in rows], [row["plain"] for row in rows])
    pace = -slope
    return {
        "moments": len(rows),
        "worth": fmean(row["gained"] for row in rows) / pace,
        "credit": fmean(row["credit"] for row in rows),
        "pace_taken": fmean(row["pace_taken"] for row in rows) / pace,
        "confidence": fmean(row["confidence"] for row in rows),
        "lasting": fmean(row["gained"] for row in rows) / fmean(row["probed"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    content: dict[str, Any] = {"reach": REACH, "tasks": {}}
    for name in arguments.tasks:
        rows = [row for seed in range(arguments.seeds) for row in run(CASES[name], seed)]
        content["tasks"][name] = told = {"rate": CASES[name].rate, **summary(rows), "rows": rows}
        print(
            f"{name:20} worth {told['worth']:5.1f} of {REACH} steps, credited {told['credit']:5.1f}, what lasts "
            f"is {told['lasting']:5.2f} of what was probed, confidence {told['confidence']:.2f}, "
            f"pace taken {told['pace_taken']:.2f} times what came, {told['moments']} moments",
            flush=True,
        )
        write_result("credit", content, arguments.out)


if __name__ == "__main__":
    main()
