"""The order of events of a comparison: tune, train every arm with every seed in turns, find the target, judge.

Everything is kept in one folder, and whatever is there already is not made again: a comparison that was interrupted,
by a signal or by kill -9, goes on when it is started again, and more seeds can be added to a finished one.

runs/my-comparison/
    compare.json            what is compared
    trials/plain-seed0/     a run folder for each arm and seed
    tuning/plain/...        one for each candidate
    result.json             what came out
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridtrainer.compare.arms import Arm
from hybridtrainer.compare.curve import Curve
from hybridtrainer.compare.findings import choose_metric, findings
from hybridtrainer.compare.options import Candidate, Options
from hybridtrainer.compare.overall import Overall
from hybridtrainer.compare.trial import Build, Trial, TrialResult
from hybridtrainer.compare.tuning import TUNING_SEED, tune
from hybridtrainer.errors import DataError, RunFolderError
from hybridtrainer.observe.environment import environment
from hybridtrainer.observe.progress import Progress
from hybridtrainer.run_folder import RunFolder
from hybridtrainer.signals import StopRequest
from hybridtrainer.tasks import build_task

WARM_UP_STEPS = 3


class StoppedError(Exception):
    """A signal asked to stop; everything is kept, and the same call goes on."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"interrupted by signal {signal}")
        self.signal = signal


def compare(
    arms: Sequence[Arm], folder: Path, options: Options, progress: Progress, build: Build = build_task
) -> dict[str, Any]:
    """Trains and judges; returns what is written to `result.json`.

    Args:
        arms: What to compare; the first baseline gives the target.
        folder: Where everything is kept.
        options: How.
        progress: Shown while it goes on.
        build: Makes a run from a configuration.

    Raises:
        RunFolderError: if the folder holds something else.
        DataError: if arms were given different data, or data have changed since the comparison was begun.
        StoppedError: if a signal asked to stop.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        kept = stack.enter_context(_open(folder))
        _remember(kept, arms, options)
        runner = _Runner(folder, options, progress, build, stop)
        tuning: dict[str, Any] | None = None
        warnings: list[str] = []
        if options.grid is not None:
            arms, tuning, warnings = tune(arms, options.grid, options.target, runner.candidates)
        trials = runner.trials(arms)
        result = findings(arms, trials, options.metric, options.target, options.tolerance)
        if tuning is None:
            warnings = ["The arms were not tuned: with --tune the verdict may be another."]
        result["warnings"] = warnings + result["warnings"]
        result |= {"name": folder.name, "tuned": tuning is not None, "tuning": tuning, "environment": environment()}
        kept.write_json("result.json", result)
    return result


def _open(folder: Path) -> RunFolder:
    if (folder / "log.jsonl").exists():
        raise RunFolderError(f"{folder} holds a run, not a comparison.", "Give the comparison another name with --run.")
    return RunFolder(folder, keep_last=1, resume=True)


def _remember(kept: RunFolder, arms: Sequence[Arm], options: Options) -> None:
    """Refuses a folder in which something else is compared. Seeds, target and tolerance may change."""
    grid = None if options.grid is None else {key: list(value) for key, value in vars(options.grid).items()}
    ours = {"v": 1, "arms": {arm.name: arm.settings() for arm in arms}, "grid": grid}
    path = kept.path / "compare.json"
    if not path.exists():
        kept.write_json(path.name, ours)
        return
    try:
        known = json.loads(path.read_text())
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged.", "Start the comparison anew under another name.") from error
    if known != json.loads(json.dumps(ours)):
        raise RunFolderError(
            f"{kept.path} holds another comparison: its arms or its grid differ from these.",
            "Give this one another name with --run.",
        )


class _Runner:
    """Makes the trials that are not there yet."""

    def __init__(self, folder: Path, options: Options, progress: Progress, build: Build, stop: StopRequest) -> None:
        self._folder = folder
        self._options = options
        self._overall = Overall(progress)
        self._build = build
        self._stop = stop
        self._warm: set[str] = set()

    def trials(self, arms: Sequence[Arm]) -> dict[str, list[TrialResult]]:
        """Every arm with every seed, all arms of a seed in turns."""
        rounds = [
            [self._trial(arm, seed, self._folder / "trials" / f"{arm.name}-seed{seed}") for arm in arms]
            for seed in range(self._options.first_seed, self._options.first_seed + self._options.seeds)
        ]
        self._make(rounds, "comparing")
        results: dict[str, list[TrialResult]] = {arm.name: [] for arm in arms}
        for trial in (trial for one_seed in rounds for trial in one_seed):
            result = trial.result()
            assert result is not None
            results[trial.arm.name].append(result)
        return results

    def candidates(self, arm: Arm, candidates: Sequence[Candidate]) -> dict[Candidate, Curve | None]:
        """Each candidate of an arm, one after the other."""
        home = self._folder / "tuning" / arm.name
        made = {
            candidate: self._trial(replace(arm, config=candidate.apply(arm.config)), TUNING_SEED, home / candidate.name)
            for candidate in candidates
        }
        self._make([[trial] for trial in made.values()], f"tuning {arm.name}")
        return {candidate: self._tuning_curve(trial) for candidate, trial in made.items()}

    def _tuning_curve(self, trial: Trial) -> Curve | None:
        result = trial.result()
        assert result is not None
        if result.status == "diverged":
            return None
        return result.curves[choose_metric([result], self._options.metric)]

    def _trial(self, arm: Arm, seed: int, folder: Path) -> Trial:
        return Trial(arm, seed, folder, self._build, self._overall.part())

    def _make(self, rounds: Sequence[Sequence[Trial]], what: str) -> None:
        left = [[trial for trial in one_round if trial.result() is None] for one_round in rounds]
        if not any(left):
            return
        self._overall.start(sum(trial.arm.config.train.steps for one_round in left for trial in one_round))
        try:
            for number, one_round in enumerate(left):
                if one_round:
                    names = ", ".join(trial.arm.name for trial in one_round)
                    self._overall.shown.message(f"{what}: {number + 1} of {len(left)} ({names})")
                for group in [[trial] for trial in one_round] if self._options.whole_runs else [one_round]:
                    self._take_turns(group)
        finally:
            self._overall.shown.stop()

    def _take_turns(self, trials: Sequence[Trial]) -> None:
        """All trials a stretch each, again and again; every second time in the opposite order."""
        for trial in trials:
            self._warm_up(trial.arm)
        with ExitStack() as stack:
            for trial in trials:
                stack.enter_context(trial)
            _require_equal_data(trials)
            running = list(trials)
            while running:
                running = [trial for trial in running if not self._turn(trial)][::-1]

    def _turn(self, trial: Trial) -> bool:
        over = trial.advance(trial.arm.config.train.eval_interval, self._stop)
        if self._stop.signal is not None and not over:
            raise StoppedError(self._stop.signal)
        return over

    def _warm_up(self, arm: Arm) -> None:
        """Some steps that are thrown away: the first ones of a process are slower than the others."""
        if arm.name in self._warm:
            return
        self._warm.add(arm.name)
        task = self._build(arm.config)
        for batch, _ in zip(task.loader, range(WARM_UP_STEPS * task.trainer.accumulate), strict=False):
            task.trainer.step([batch] * task.trainer.accumulate if task.trainer.accumulate > 1 else batch)
        task.trainer.evaluate(task.validation[:1])


def _require_equal_data(trials: Sequence[Trial]) -> None:
    for trial in trials[1:]:
        if trial.digest != trials[0].digest:
            raise DataError(
                f"The arms {trials[0].arm.name} and {trial.arm.name} were given different data.",
                "Give all arms the same data and validation split, or their metrics mean different things.",
            )
