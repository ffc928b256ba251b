"""Trains a few steps of a configuration to see what memory they take. Nothing of the run is kept but its profile."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hybridtrainer.config import RunConfig
from hybridtrainer.config_io import to_toml
from hybridtrainer.memory.components import device_of
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.models.gpt import GPT, build_gpt
from hybridtrainer.observe.profile_summary import ProfileReport
from hybridtrainer.observe.profiler import MemoryProfiler
from hybridtrainer.observe.progress import Progress
from hybridtrainer.observe.runlog import RunLog
from hybridtrainer.observe.snapshots import Snapshot
from hybridtrainer.observe.upkeep import PROFILE
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.planning.machine import gpu_at_hand
from hybridtrainer.planning.pieces import rehearse_pieces
from hybridtrainer.planning.planned import planned_of
from hybridtrainer.planning.resident import estimate_resident, rehearse_resident
from hybridtrainer.planning.settle import state_tensors
from hybridtrainer.planning.speeds import speeds_at_hand
from hybridtrainer.planning.streamed import estimate_streamed
from hybridtrainer.predict.averages import averages_of, usable_bytes
from hybridtrainer.records import PlanResult
from hybridtrainer.signals import StopRequest
from hybridtrainer.tasks import Task, build_task, loss_of_text


@dataclass(frozen=True)
class Profiled:
    """What was found.

    Attributes:
        report: What the snapshots amount to.
        snapshots: One for each step.
        plan: What a plan says of these settings, or why there is none.
        against_plan: The plan beside what was taken; None where there is none.
        signal: The signal that ended it early, where one did.
        error: What ended it early otherwise.
    """

    report: ProfileReport
    snapshots: list[Snapshot]
    plan: Estimate | str
    against_plan: PlanResult | None
    signal: int | None
    error: Exception | None = None


def profile_run(config: RunConfig, steps: int, folder: Path, spike_bytes: int, progress: Progress) -> Profiled:
    """Trains until the clock shows `steps`, without checkpoints, and returns the memory it took.

    Args:
        config: What to train; its length and schedule stay what they are.
        steps: Where to stop, if the run is not over before.
        folder: Where the log, the settings and the profile go, as a report wants them.
        spike_bytes: From which rise on a step is a spike.
        progress: Told of everything.

    Raises:
        What `build_task` raises, and training before its first step is made; what it raises later is returned.
        ModelError: if the user's file of measured speeds is damaged.
    """
    task = build_task(_grown_at_once(config))
    loop = task.loop(progress)
    upkeep, hardware = loop.upkeep, _speeds(task) if loop.upkeep.vram is not None else None
    profiler = MemoryProfiler(task.trainer.model, task.trainer.optimizer, spike_bytes=spike_bytes, vram=upkeep.vram)
    upkeep.profiler = profiler
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        loop.log = stack.enter_context(RunLog(folder / "log.jsonl"))
        error = None
        with loop:
            try:
                loop.advance(steps, stop)
            except Exception as raised:
                if not profiler.snapshots:
                    raise
                error = raised
        plan = plan_of(task, upkeep.vram is not None, hardware)
        upkeep.plan.planned = task.planned if isinstance(plan, str) else planned_of(plan, hardware, on_gpu=True)
        if error is None:
            result = loop.finish(stop.signal)
            loop.log.write("end", step=result.steps, status=result.status, training_seconds=result.training_seconds)
    profiler.export(folder / PROFILE)
    against = upkeep.plan.result(task.trainer.jumps.has_windows)
    return Profiled(profiler.report(), profiler.snapshots, plan, against, stop.signal, error)


def _speeds(task: Task) -> Hardware | None:
    """Of the GPU that the task is on, where they are known."""
    gpu = gpu_at_hand(device_of(task.trainer.model, task.trainer.optimizer).index or 0)
    return None if gpu is None else speeds_at_hand(gpu.name)


def _grown_at_once(config: RunConfig) -> RunConfig:
    """What a run takes in the end is what the whole model takes: one that begins short grows after its first step."""
    if config.predict != "auto" and "depth" not in config.predict:
        return config
    return config.model_copy(update={"depth": config.depth.model_copy(update={"until": 1 / (1 << 40)})})


def plan_of(task: Task, on_gpu: bool, hardware: Hardware | None = None) -> Estimate | str:
    """What a plan says of a task's settings, or why there is none; seconds where the machine's speeds are given."""
    config, model = task.config, task.trainer.model
    if not on_gpu:
        return "plans are for a GPU, and this run is on the CPU"
    if not isinstance(model, GPT):
        return f"plans are for decoders, and {config.model.name} is none"
    memory, samples, context = config.memory, config.train.batch_size, config.model.context
    empty = build_gpt(
        config.model.name,
        vocabulary=model.config.vocabulary,
        context=context,
        dropout=config.model.dropout,
        device="meta",
    )
    usable, is_streamed = usable_bytes(model, memory.vram), memory.mode != "resident"
    averages = averages_of(model, config, usable, is_streamed=is_streamed)
    if not is_streamed:
        if config.optimizer.name not in ("adam", "adamw"):
            return f"plans of a resident model count the states of AdamW, and the optimizer is {config.optimizer.name}"
        loss = loss_of_text(model.config.vocabulary)
        step = rehearse_resident(empty, memory, samples, context, config.train.accumulate, loss)
        return estimate_resident(step, hardware, state_tensors(config), memory, averages)
    assert memory.mode != "auto" and memory.mode != "resident"  # noqa: PLR1714, PT018  # a task's settings are settled
    optimizer = task.trainer.optimizer
    assert isinstance(optimizer, StreamedOptimizer)
    pieces = rehearse_pieces(empty, memory.mode, samples, context, memory.split, precision=memory.precision)
    engine = optimizer.engine
    pack = engine.rings.weights.is_packed
    return estimate_streamed(pieces, memory, hardware, engine.is_link_bound, pack, averages)
