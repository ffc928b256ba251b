"""The records of a log gone through one by one: what is counted, and what is drawn. Reads no file.

Everything comes from the log, so that a run that is still going on, or was killed, has a report too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridtrainer.observe.outlook import smoothing_steps
from hybridtrainer.records import Phase
from hybridtrainer.report.downsample import SHORTEST_WINDOW, Point, forward_only, smooth
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


class StepTaken(NamedTuple):
    """A step of the log; `foreseen` is 0 for a real one."""

    seconds: float
    step: float
    phase: str
    loss: float | None
    foreseen: float


class Measured(NamedTuple):
    """An evaluation of the log."""

    seconds: float
    step: float
    metrics: dict[str, float | None]


@dataclass
class Story:
    """Goes through the records of a log, one by one."""

    status: str = "unfinished"
    clock: int = 0
    now: float = 0.0
    trained: float | None = None
    real_steps: int = 0
    foreseen: int = 0
    jump_seconds: float = 0.0
    forecast_end: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: list[StepTaken] = field(default_factory=list)
    evaluations: list[Measured] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    remarks: list[tuple[int | None, str, str]] = field(default_factory=list)
    plan: Mapping[str, Any] | None = None

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
            self.evaluations.append(Measured(self.now, step, metrics))
            self._trained_for(record)
        elif kind == "memory":
            used = (number(record.get(f"{what}_bytes")) for what in ("host", "device", "device_peak"))
            self.memory.append(MemorySample(self.now, _phase(record), *used))
        elif kind == "forecast":
            self.forecast_end = max(self.forecast_end, whole(record.get("target_step")) or 0)
        elif kind == "plan":
            self.plan = record
        elif kind in ("notice", "error"):
            text = str(record.get("text" if kind == "notice" else "error", ""))
            self.remarks.append((whole(record.get("step")), str(kind), text))
            self.status = "error" if kind == "error" else self.status
        elif kind == "resume":
            self.remarks.append((self.clock, "resume", "The run was resumed from a checkpoint."))
            self.status = "unfinished"
        elif kind == "end":
            self.status = str(record.get("status", "finished"))
            self._trained_for(record)

    def _trained_for(self, record: Mapping[str, Any]) -> None:
        """The training time so far, where a record has it: steps and what is between them, such as fetching batches."""
        known = number(record.get("training_seconds"))
        self.trained = self.trained if known is None else known

    def _step(self, record: Mapping[str, Any]) -> None:
        took = max(0.0, number(record.get("seconds")) or 0.0)
        step, phase = number(record.get("step")) or 0.0, _phase(record)
        self.seconds["predict"] += min(took, self.jump_seconds)
        self.seconds[phase] += max(0.0, took - self.jump_seconds)
        self.jump_seconds = 0.0
        self.now += took
        self.trained = None if self.trained is None else self.trained + took  # until the next record that knows it
        foreseen = number(record.get("predicted")) or 0.0
        loss = number(record.get("loss"))
        self.real_steps += not foreseen
        self.clock = round(step)
        self.steps.append(StepTaken(self.now, step, phase, loss, foreseen))

    def by_time(self) -> Curves:
        """Everything that happened, over training seconds."""
        return _curves(self.steps, self.evaluations, lambda known: known.seconds)

    def by_step(self) -> Curves:
        """What counts in the end, over steps."""
        kept = self._kept()
        measured = [self.evaluations[at] for at in forward_only([known.step for known in self.evaluations])]
        return _curves(kept, measured, lambda known: known.step)

    def smoothed(self) -> list[tuple[float, float]]:
        """Training loss by step, each the mean over as many steps as forecasts are made for."""
        real = [known for known in self._kept() if not known.foreseen and known.loss is not None]
        window = smoothing_steps(max(self.forecast_end, self.clock))
        means: list[tuple[float, float]] = []
        total, first = 0.0, 0
        for known in real:
            total += known.loss or 0.0
            while real[first].step <= known.step - window:
                total -= real[first].loss or 0.0
                first += 1
            means.append((known.step, total / (len(means) + 1 - first)))
        return means

    def _kept(self) -> list[StepTaken]:
        return [self.steps[at] for at in forward_only([known.step for known in self.steps])]

    def last_evaluation(self) -> tuple[int, dict[str, float]] | None:
        """The newest measurement."""
        if not self.evaluations:
            return None
        last = self.evaluations[-1]
        return round(last.step), {metric: value for metric, value in last.metrics.items() if value is not None}


def _curves(
    steps: Sequence[StepTaken], measured: Sequence[Measured], place: Callable[[StepTaken | Measured], float]
) -> Curves:
    """What is drawn along the axis on which `place` says where things are."""
    # After a jump `loss` is that of the probe, which is no training loss: it has no place on the curve.
    real = [known for known in steps if not known.foreseen]
    window = max(SHORTEST_WINDOW, len(real) / 100)
    loss = list(zip([place(known) for known in real], smooth([known.loss for known in real], window), strict=True))
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
