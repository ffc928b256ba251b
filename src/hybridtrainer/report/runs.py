"""A run folder as plain data for the page. Reads files, draws nothing, and knows no trainer.

Everything is counted from the log, so that a run that is still going on, or was killed, has a report too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hybridtrainer.errors import RunFolderError
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.records import Phase
from hybridtrainer.report.downsample import Point, forward_only, smooth
from hybridtrainer.report.forecasts import Forecasts, forecasts
from hybridtrainer.report.jumps import Attempt, attempts
from hybridtrainer.report.settings import flat, read_json, read_toml
from hybridtrainer.report.values import number, whole

PHASES = tuple(str(phase) for phase in Phase)
NOT_METRICS = frozenset(
    {"v", "kind", "step", "seconds", "training_seconds", "forward_samples", "backward_samples"}
)  # fields of an evaluation that are no measure of quality


@dataclass(frozen=True)
class Stretch:
    """A phase, from its begin to its end on an axis."""

    begin: float
    end: float
    phase: str


@dataclass(frozen=True)
class Curves:
    """What is drawn along one axis: training seconds, or steps."""

    loss: list[Point]
    evaluations: dict[str, list[Point]]
    phases: list[Stretch]


@dataclass(frozen=True)
class MemorySample:
    """Memory in use at a moment of a run, in bytes."""

    seconds: float
    phase: str
    host: float | None
    device: float | None
    device_peak: float | None


@dataclass(frozen=True)
class Run:
    """All that a page shows of one run.

    Attributes:
        name: What the run is called on the page.
        status: "finished", "paused", "interrupted", "error", or "unfinished" where the log has no end.
        steps: The clock at the end.
        real_steps: Steps that were computed, those rolled back later included.
        foreseen_steps: Steps credited to jumps that were not undone.
        training_seconds: Time inside steps.
        seconds_by_phase: The same by phase; refused jumps count as predict.
        by_time: Curves over training seconds, everything that happened.
        by_step: Curves over steps, without what was rolled back.
        last_evaluation: What was measured last, by metric, and at which step.
        jumps: All attempts.
        forecasts: Forecasts of the loss.
        memory: Memory over time; empty where it was not recorded.
        remarks: Notices and errors of the log as (step, kind, text), and what was wrong with the folder's files.
        settings: The configuration, flat.
        environment: Versions and hardware, flat.
        declined: Why no jump was tried, with counts.
    """

    name: str
    status: str
    steps: int
    real_steps: int
    foreseen_steps: int
    training_seconds: float
    seconds_by_phase: dict[str, float]
    by_time: Curves
    by_step: Curves
    last_evaluation: tuple[int, dict[str, float]] | None
    jumps: list[Attempt]
    forecasts: Forecasts
    memory: list[MemorySample]
    remarks: list[tuple[int | None, str, str]]
    settings: dict[str, str]
    environment: dict[str, str]
    declined: dict[str, int]

    def jumped(self, verdict: str) -> int:
        """How many attempts ended so."""
        return sum(attempt.verdict == verdict for attempt in self.jumps)


def read_run(folder: Path, name: str | None = None) -> Run:
    """Reads the folder of a run.

    Raises:
        RunFolderError: if it has no log, or one that is empty or damaged.
    """
    path = folder / "log.jsonl"
    records = read_log(path)
    torn = not path.read_bytes().endswith(b"\n")
    story = _Story()
    for record in records:
        story.take(record)
    if not records or not (story.steps or story.remarks or story.evaluations):
        raise RunFolderError(
            f"The log {path} is empty: nothing has been recorded yet.", "Wait for the first step, or name another run."
        )
    config, config_fault = read_toml(folder / "config.toml")
    environment, environment_fault = read_json(folder / "environment.json")
    statistics, statistics_fault = read_json(folder / "statistics.json")
    remarks = [(None, "file", fault) for fault in (config_fault, environment_fault, statistics_fault) if fault]
    if torn:
        remarks.append((None, "file", "The last line of the log is torn and was left out: a crash cut it off."))
    by_step = story.by_step()
    known = [(x, y) for x, y in by_step.loss if y is not None]
    declined = statistics.get("declined")
    return Run(
        name=name or folder.resolve().name,
        status=story.status,
        steps=story.clock,
        real_steps=story.real_steps,
        foreseen_steps=story.foreseen,
        training_seconds=story.now,
        seconds_by_phase=dict(story.seconds),
        by_time=story.by_time(),
        by_step=by_step,
        last_evaluation=story.last_evaluation(),
        jumps=attempts(records),
        forecasts=forecasts(records, known),
        memory=story.memory,
        remarks=[*remarks, *story.remarks],
        settings=flat(config),
        environment=flat(environment),
        declined={str(k): whole(v) or 0 for k, v in declined.items()} if isinstance(declined, dict) else {},
    )


class _Step(NamedTuple):
    """A step of the log; `foreseen` is 0 for a real one."""

    seconds: float
    step: float
    phase: str
    loss: float | None
    foreseen: float


class _Measured(NamedTuple):
    """An evaluation of the log."""

    seconds: float
    step: float
    metrics: dict[str, float | None]


@dataclass
class _Story:
    """Goes through the records of a log, one by one."""

    status: str = "unfinished"
    clock: int = 0
    now: float = 0.0
    real_steps: int = 0
    foreseen: int = 0
    jump_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: list[_Step] = field(default_factory=list)
    evaluations: list[_Measured] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    remarks: list[tuple[int | None, str, str]] = field(default_factory=list)

    def take(self, record: Mapping[str, Any]) -> None:
        """Takes in one record; kinds that are not known are left out."""
        kind = record["kind"]
        if kind == "step":
            self._step(record)
        elif kind == "jump":
            worth = whole(record.get("worth_steps")) or 0
            self.foreseen += {"accepted": worth, "rolled back": -worth}.get(str(record.get("verdict")), 0)
            self.jump_seconds += number(record.get("seconds")) or 0.0
        elif kind == "evaluation":
            step = number(record.get("step")) or 0.0
            metrics = {str(key): number(value) for key, value in record.items() if key not in NOT_METRICS}
            self.evaluations.append(_Measured(self.now, step, metrics))
        elif kind == "memory":
            used = (number(record.get(f"{what}_bytes")) for what in ("host", "device", "device_peak"))
            self.memory.append(MemorySample(self.now, _phase(record), *used))
        elif kind in ("notice", "error"):
            text = str(record.get("text" if kind == "notice" else "error", ""))
            self.remarks.append((whole(record.get("step")), str(kind), text))
            self.status = "error" if kind == "error" else self.status
        elif kind == "resume":
            self.remarks.append((self.clock, "resume", "The run was resumed from a checkpoint."))
            self.status = "unfinished"
        elif kind == "end":
            self.status = str(record.get("status", "finished"))

    def _step(self, record: Mapping[str, Any]) -> None:
        took = max(0.0, number(record.get("seconds")) or 0.0)
        step, phase = number(record.get("step")) or 0.0, _phase(record)
        self.seconds["predict"] += min(took, self.jump_seconds)
        self.seconds[phase] += max(0.0, took - self.jump_seconds)
        self.jump_seconds = 0.0
        self.now += took
        foreseen = number(record.get("predicted")) or 0.0
        loss = number(record.get("loss"))
        self.real_steps += not foreseen
        self.clock = round(step)
        self.steps.append(_Step(self.now, step, phase, loss, foreseen))

    def by_time(self) -> Curves:
        """Everything that happened, over training seconds."""
        return _curves(self.steps, self.evaluations, lambda known: known.seconds)

    def by_step(self) -> Curves:
        """What counts in the end, over steps."""
        kept = [self.steps[at] for at in forward_only([known.step for known in self.steps])]
        measured = [self.evaluations[at] for at in forward_only([known.step for known in self.evaluations])]
        return _curves(kept, measured, lambda known: known.step)

    def last_evaluation(self) -> tuple[int, dict[str, float]] | None:
        """The newest measurement."""
        if not self.evaluations:
            return None
        last = self.evaluations[-1]
        return round(last.step), {metric: value for metric, value in last.metrics.items() if value is not None}


def _curves(
    steps: Sequence[_Step], measured: Sequence[_Measured], place: Callable[[_Step | _Measured], float]
) -> Curves:
    """What is drawn along the axis on which `place` says where things are."""
    # After a jump `loss` is that of the probe, which is no training loss: it has no place on the curve.
    real = [known for known in steps if not known.foreseen]
    loss = list(zip([place(known) for known in real], smooth([known.loss for known in real]), strict=True))
    evaluations: dict[str, list[Point]] = {}
    for known in measured:
        for metric, value in known.metrics.items():
            evaluations.setdefault(metric, []).append((place(known), value))
    phases: list[Stretch] = []
    for step in steps:
        begin = phases[-1].end if phases else 0.0
        if phases and phases[-1].phase == step.phase:
            begin = phases.pop().begin
        phases.append(Stretch(begin, place(step), step.phase))
    return Curves(loss, evaluations, phases)


def _phase(record: Mapping[str, Any]) -> str:
    phase = str(record.get("phase", ""))
    return phase if phase in PHASES else "other"
