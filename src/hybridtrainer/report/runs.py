"""A run folder as plain data for the page. Reads files, draws nothing, and knows no trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridtrainer.errors import RunFolderError
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.observe.snapshots import Snapshot, read_snapshots
from hybridtrainer.report.forecasts import Forecasts, forecasts
from hybridtrainer.report.jumps import Attempt, attempts
from hybridtrainer.report.plan_sections import PlanTold, plan_told
from hybridtrainer.report.settings import flat, read_json, read_toml
from hybridtrainer.report.story import Curves, MemorySample, Story
from hybridtrainer.report.values import number, whole


@dataclass(frozen=True)
class Run:
    """All that a page shows of one run.

    Attributes:
        name: What the run is called on the page.
        status: "finished", "paused", "interrupted", "error", or "unfinished" where the log has no end.
        steps: The clock at the end.
        real_steps: Steps that were computed, those rolled back later included.
        foreseen_steps: Steps credited to jumps that were not undone.
        training_seconds: Training time, fetching of batches included; None where the log does not have it.
        step_seconds: Time inside steps.
        seconds_by_phase: The same by phase; refused jumps count as predict.
        by_time: Curves over the time inside steps, everything that happened.
        by_step: Curves over steps, without what was rolled back.
        smoothed: Training loss by step, smoothed over so few steps that forecasts can be held against it.
        last_evaluation: What was measured last, by metric, and at which step.
        jumps: All attempts.
        forecasts: Forecasts of the loss.
        memory: Memory over time; empty where it was not recorded.
        profile: Memory at each step; empty where `memory.profile` was off.
        remarks: Notices and errors of the log as (step, kind, text), and what was wrong with the folder's files.
        settings: The configuration, flat.
        environment: Versions and hardware, flat.
        declined: Why no jump was tried, with counts.
        worth: Seconds that each kind of foresight has saved, by estimate.
        plan: What it was planned to take, beside what it took; None where it was not planned.
    """

    name: str
    status: str
    steps: int
    real_steps: int
    foreseen_steps: int
    training_seconds: float | None
    step_seconds: float
    seconds_by_phase: dict[str, float]
    by_time: Curves
    by_step: Curves
    smoothed: list[tuple[float, float]]
    last_evaluation: tuple[int, dict[str, float]] | None
    jumps: list[Attempt]
    forecasts: Forecasts
    memory: list[MemorySample]
    profile: list[Snapshot]
    remarks: list[tuple[int | None, str, str]]
    settings: dict[str, str]
    environment: dict[str, str]
    declined: dict[str, int]
    worth: dict[str, float]
    plan: PlanTold | None

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
    story = Story()
    for record in records:
        story.take(record)
    told = any(kind != "resume" for _, kind, _ in story.remarks)
    if not (story.steps or story.evaluations or told):
        raise RunFolderError(
            f"The log {path} is empty: nothing has been recorded yet.", "Wait for the first step, or name another run."
        )
    config, config_fault = read_toml(folder / "config.toml")
    environment, environment_fault = read_json(folder / "environment.json")
    statistics, statistics_fault = read_json(folder / "statistics.json")
    profile, profile_fault = _profile(folder / "profile.csv")
    plan, plan_fault = plan_told(story.plan, folder)
    faults = (config_fault, environment_fault, statistics_fault, profile_fault, plan_fault)
    remarks = [(None, "file", fault) for fault in faults if fault]
    if torn:
        remarks.append((None, "file", "The last line of the log is torn and was left out: a crash cut it off."))
    smoothed = story.smoothed()
    declined, worth = statistics.get("declined"), statistics.get("worth_seconds")
    return Run(
        name=name or folder.resolve().name,
        status=story.status,
        steps=story.clock,
        real_steps=story.real_steps,
        foreseen_steps=story.foreseen,
        training_seconds=story.trained,
        step_seconds=story.now,
        seconds_by_phase=dict(story.seconds),
        by_time=story.by_time(),
        by_step=story.by_step(),
        smoothed=smoothed,
        last_evaluation=story.last_evaluation(),
        jumps=attempts(records),
        forecasts=forecasts(records, smoothed),
        memory=story.memory,
        profile=profile,
        remarks=[*remarks, *story.remarks],
        settings=flat(config),
        environment=flat(environment),
        declined={str(k): whole(v) or 0 for k, v in declined.items()} if isinstance(declined, dict) else {},
        worth={str(k): number(v) or 0.0 for k, v in worth.items()} if isinstance(worth, dict) else {},
        plan=plan,
    )


def _profile(path: Path) -> tuple[list[Snapshot], str]:
    """The snapshots of a profile, and what was wrong with it; both empty where there is none."""
    if not path.exists():
        return [], ""
    try:
        return read_snapshots(path), ""
    except RunFolderError:
        return [], f"{path.name} is damaged and was left out."
