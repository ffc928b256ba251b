"""One arm trained with one seed, in turns with others, in a run folder of its own.

What a trial found is read from its log alone, so it does not matter in how many processes it was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from hybridtrainer.compare.arms import Arm
from hybridtrainer.compare.curve import Curve, Point
from hybridtrainer.compare.options import HIGHER_IS_BETTER
from hybridtrainer.config import RunConfig
from hybridtrainer.config_io import load_config, to_toml
from hybridtrainer.errors import DivergenceError, RunFolderError
from hybridtrainer.fit import Loop
from hybridtrainer.observe.progress import Progress
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.observe.trackers import find_trackers
from hybridtrainer.randomness import RandomState
from hybridtrainer.run_folder import RunFolder
from hybridtrainer.signals import StopRequest
from hybridtrainer.tasks import Task

Build = Callable[[RunConfig], Task]
LARGEST = 1e300
NO_JUMPS = "no jumps: "  # how the notice of a run begins that will make no jump at all


@dataclass(frozen=True)
class TrialResult:
    """What a finished trial found.

    Attributes:
        seed: Its seed.
        folder: Where it is kept.
        status: "finished", or "diverged" when nothing finite could be computed any more.
        reason: Why it diverged.
        curves: One for each metric.
        evaluation_seconds: Time in evaluations; not part of the training time.
        jumps: Jumps that were kept.
        no_jump: Why there was none, as far as the log says it.
    """

    seed: int
    folder: Path
    status: Literal["finished", "diverged"]
    reason: str
    curves: dict[str, Curve]
    evaluation_seconds: float
    jumps: int
    no_jump: str = ""


class Trial:
    """A run on its way.

    Args:
        arm: What to train.
        seed: With which seed.
        folder: Where; a trial that was interrupted there goes on.
        build: Makes model, data and trainer from a configuration.
        progress: Told of its steps.
        accept_data: Called with the arm's name and the digest of its data; raises if they are not the right ones.
    """

    def __init__(
        self,
        arm: Arm,
        seed: int,
        folder: Path,
        build: Build,
        progress: Progress,
        accept_data: Callable[[str, str], None],
    ) -> None:
        self.arm = arm
        self.seed = seed
        self.folder = folder
        self._build = build
        self._progress = progress
        self._accept_data = accept_data
        self._stack = ExitStack()
        self._loop: Loop | None = None
        self._random: RandomState | None = None

    def result(self) -> TrialResult | None:
        """What it found, None while it is not finished.

        Raises:
            RunFolderError: if the folder holds a run with other settings, or a damaged one.
        """
        path = self.folder / "config.toml"
        if path.exists():
            known = _settings(load_config(path))
            if known != _settings(self._config()):
                raise RunFolderError(
                    f"{self.folder} holds a trial with other settings.", "Remove it, or begin another comparison."
                )
        return read_result(self.seed, self.folder)

    def _config(self) -> RunConfig:
        run = self.arm.config.run.model_copy(update={"folder": str(self.folder.parent), "name": self.folder.name})
        return self.arm.config.model_copy(update={"seed": self.seed, "run": run})

    def __enter__(self) -> Self:
        """Builds the run and goes to where it was interrupted, if it was."""
        config = self._config()
        makers = find_trackers(config.run.trackers)
        task = self._build(config)
        self._accept_data(self.arm.name, task.data_digest())
        with ExitStack() as stack:  # whatever fails here gives the folder free again
            folder = stack.enter_context(RunFolder(self.folder, config.keep_last, resume=True))
            _require_whole_log(folder)
            self._loop = task.loop(self._progress)
            self._loop.keep_in(folder, resume=True, config_text=to_toml(config), stack=stack, makers=makers)
            stack.enter_context(self._loop)
            self._stack = stack.pop_all()
        self._random = RandomState.capture()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._loop = None

    def advance(self, steps: int, stop: StopRequest) -> bool:
        """Goes on for about `steps` steps of the clock; returns whether the trial is over."""
        assert self._loop is not None
        assert self._random is not None
        self._random.restore()  # others have drawn from the same generators meanwhile
        try:
            over = self._loop.advance(self._loop.trainer.step_count + steps, stop)
            if over:
                self._loop.finish()
        except DivergenceError:  # it is in the log, and a finding like any other
            over = True
        self._random = RandomState.capture()
        return over

    def pause(self, signal: int) -> None:
        """A checkpoint of where it is: a signal asked to stop."""
        assert self._loop is not None
        assert self._random is not None
        self._random.restore()
        self._loop.finish(signal)


def _settings(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude={"run"})


def _require_whole_log(folder: RunFolder) -> None:
    """A log that lost lines which its checkpoint knows of would give a curve with a hole."""
    checkpoint = folder.checkpoints.newest()
    known = 0 if checkpoint is None else int(checkpoint.manifest["extra"].get("log_bytes", 0))
    size = folder.log_path.stat().st_size if folder.log_path.exists() else 0
    if size < known:
        raise RunFolderError(
            f"{folder.log_path} has lost lines: its checkpoint was made when it was longer.",
            f"Remove {folder.path}, and it is trained again.",
        )


def read_result(seed: int, folder: Path) -> TrialResult | None:
    """The findings of a trial from its log; None where it has not come to its end.

    Raises:
        RunFolderError: if the log is damaged.
    """
    if not (folder / "log.jsonl").exists():
        return None
    records = read_log(folder / "log.jsonl")
    finished = any(record["kind"] == "end" and record["status"] == "finished" for record in records)
    errors = [record["error"] for record in records if record["kind"] == "error"]
    diverged = next((error for error in errors if error.startswith(DivergenceError.__name__)), "")
    if not finished and not diverged:
        return None
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    kept = sum(record["kind"] == "jump" and record["verdict"] == "kept" for record in records)
    metrics = {name for record in evaluations for name in record if name in HIGHER_IS_BETTER}
    return TrialResult(
        seed,
        folder,
        "finished" if finished else "diverged",
        diverged.partition(": ")[2],
        {name: _curve(evaluations, name, bool(diverged)) for name in sorted(metrics)},
        sum(record["seconds"] for record in evaluations),
        kept,
        "" if kept else _no_jump(records),
    )


def _no_jump(records: list[dict[str, Any]]) -> str:
    """Why no jump was kept: what the run decided before its first step, or how its last attempt ended."""
    notices = [record["text"] for record in records if record["kind"] == "notice"]
    decided = next((text for text in notices if text.startswith(NO_JUMPS)), None)
    if decided is not None:
        return str(decided).removeprefix(NO_JUMPS)
    tried = [record for record in records if record["kind"] == "jump"]
    undone = [record for record in tried if record["verdict"] in ("refused", "rolled back")]
    if undone:
        return f"of {len(undone)} that were tried the last was {undone[-1]['verdict']} ({undone[-1]['reason']})"
    reasons = [record["reason"] for record in records if record["kind"] == "step" and record.get("reason")]
    return str(next((reason for reason in reversed(reasons) if reason.startswith("confidence")), ""))


def _curve(evaluations: list[dict[str, Any]], metric: str, diverged: bool) -> Curve:
    points = tuple(
        Point(
            record["step"],
            record["training_seconds"],
            _measured(record[metric]),
            record["forward_samples"],
            record["backward_samples"],
        )
        for record in evaluations
    )
    return Curve(points, HIGHER_IS_BETTER[metric], diverged)


def _measured(value: Any) -> float:
    """What was not finite is in the log as its name; what no mean can be taken of is not finite either."""
    number = float(value)
    return number if abs(number) < LARGEST else math.nan
