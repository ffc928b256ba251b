"""Trains one row and says what came out: losses, perplexity, memory by phase beside its plan, time."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from statistics import mean, median
from typing import Any

import torch

from benchmarks.validation.rows import Row, merged
from hybridtrainer.config_io import parse_config
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.observe.own_host import own_host_bytes
from hybridtrainer.observe.profiler import MemoryProfiler
from hybridtrainer.observe.progress import make_progress
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.speeds import speeds_at_hand
from hybridtrainer.profile_run import plan_of
from hybridtrainer.records import JumpRecord, Notice, Record, StepResult
from hybridtrainer.signals import StopRequest
from hybridtrainer.tasks import Task, build_task
from hybridtrainer.trainer import HybridTrainer

GIB = 1 << 30
CURVE_POINTS = 100
NO_PLAN = "no plan"
BEFORE, DIVERGED = 20, 1.5


class Told:
    """What the trainer tells of: every step, and what is worth a line."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.phases: dict[str, int] = {}
        self.jumps: dict[str, int] = {}
        self.notices: list[str] = []
        self.jump_bytes = 0

    def watch_jumps(self, trainer: HybridTrainer) -> None:
        """From now on sees what the GPU holds while a jump is tried, after what leaves has left."""
        try_out = trainer.jumps.try_out

        def watched(*given: Any) -> Any:
            torch.cuda.reset_peak_memory_stats()
            try:
                return try_out(*given)
            finally:
                self.jump_bytes = max(self.jump_bytes, torch.cuda.max_memory_allocated())

        trainer.jumps.try_out = watched  # type: ignore[assignment,method-assign]

    def __call__(self, record: Record) -> None:
        """Takes in one record."""
        if isinstance(record, StepResult):
            self.steps.append(record)
            self.phases[record.phase.value] = self.phases.get(record.phase.value, 0) + 1
        elif isinstance(record, JumpRecord):
            self.jumps[record.verdict] = self.jumps.get(record.verdict, 0) + 1
        elif isinstance(record, Notice):
            self.notices.append(f"step {record.step}: {record.text}")

    def divergences(self) -> int:
        """Losses that are not finite, or half as high again as the mean of those before."""
        losses = [step.loss for step in self.steps]
        return sum(
            not math.isfinite(loss) or loss > DIVERGED * mean(losses[at - BEFORE : at])
            for at, loss in enumerate(losses)
            if at >= BEFORE
        )


def train(row: Row, data: dict[str, Any], steps: int | None = None, seed: int = 0) -> dict[str, Any]:
    """One row, in this process, with the card's memory as the limit.

    Args:
        data: Settings of the text and its tokenizer.
        steps: Instead of the row's own.
    """
    settings = merged(row.settings, {"data": data, "seed": seed})
    if steps is not None:
        settings = merged(settings, {"train": {"steps": steps}})
    on_gpu = torch.cuda.is_available()
    if on_gpu and row.card is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, row.card * GIB / total))
    began = time.perf_counter()
    task = build_task(parse_config(settings))
    ready = time.perf_counter() - began
    told = Told()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        told.watch_jumps(task.trainer)
    task.trainer.listeners.append(told)
    loop = task.loop(make_progress("off"))
    profiler = MemoryProfiler(task.trainer.model, task.trainer.optimizer, vram=loop.upkeep.vram)
    loop.upkeep.profiler = profiler
    with StopRequest() as stop, loop:
        loop.advance(task.config.train.steps, stop)
    result = loop.finish(stop.signal)
    report = profiler.report()
    return {
        "settings": settings,
        "memory_settings": task.config.memory.model_dump(exclude_defaults=True),
        "planned": task.planned.text if task.planned else "",
        "parameters": sum(each.numel() for each in task.trainer.model.parameters()),
        "tokens_per_step": task.config.train.batch_size * task.config.train.accumulate * task.config.model.context,
        "ready_seconds": ready,
        "training_seconds": result.training_seconds,
        "seconds_per_step": result.training_seconds / max(1, result.steps),
        "seconds_per_real_step": median(step.seconds for step in told.steps if not step.predicted),
        "curve": _curve(told.steps),
        "first_loss": _mean(told.steps[:5]),
        "last_loss": _mean(told.steps[-5:]),
        "evaluations": _timed(result.evaluations, told.steps),
        "perplexity": math.exp(result.evaluations[-1]["loss"]) if result.evaluations else None,
        "gradient_norm": _norms(told.steps),
        "phases": told.phases,
        "jumps": told.jumps,
        "statistics": task.trainer.statistics().to_dict(),
        "divergences": told.divergences(),
        "notices": told.notices,
        "reserved_peak_bytes": report.reserved_peak_bytes,
        "phase_bytes": {name: use.max_bytes for name, use in report.phases.items()},
        "jump_bytes": told.jump_bytes,
        "host_bytes": own_host_bytes(),
        "packed": _packed(task),
        "plan": _plan(task, on_gpu),
    }


def _packed(task: Task) -> bool:
    """Whether weights travelled packed."""
    optimizer = task.trainer.optimizer
    return isinstance(optimizer, StreamedOptimizer) and optimizer.engine.rings.weights.is_packed


def _plan(task: Task, on_gpu: bool) -> dict[str, Any]:
    """What the planner says of the settings that were trained with."""
    hardware = speeds_at_hand(torch.cuda.get_device_name()) if on_gpu else None
    found = plan_of(task, on_gpu, hardware)
    if not isinstance(found, Estimate):
        return {NO_PLAN: found}
    return asdict(found) | {"gpu_bytes": found.gpu_bytes, "host_bytes": found.host_bytes}


def _timed(evaluations: list[dict[str, float]], steps: list[StepResult]) -> list[dict[str, float]]:
    """Evaluations, each with the seconds that had been trained."""
    return [
        each | {"seconds": sum(step.seconds for step in steps if step.step <= each["step"])} for each in evaluations
    ]


def _curve(steps: list[StepResult]) -> list[tuple[int, float]]:
    """The training loss, averaged over stretches of steps."""
    size = max(1, math.ceil(len(steps) / CURVE_POINTS))
    pieces = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [(piece[-1].step, round(_mean(piece), 4)) for piece in pieces]


def _mean(steps: list[StepResult]) -> float:
    return sum(step.loss for step in steps) / max(1, len(steps))


def _norms(steps: list[StepResult]) -> dict[str, float]:
    norms = sorted(step.grad_norm for step in steps if step.grad_norm is not None)
    return {"median": median(norms), "largest": norms[-1]} if norms else {}
