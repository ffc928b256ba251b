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

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridtrainer.compare.arms import Arm
from hybridtrainer.compare.curve import Curve
from hybridtrainer.compare.findings import choose_metric, findings, finite
from hybridtrainer.compare.identity import Identity
from hybridtrainer.compare.options import Candidate, Options
from hybridtrainer.compare.overall import Overall
from hybridtrainer.compare.trial import Build, Trial, TrialResult
from hybridtrainer.compare.tuning import TUNING_SEED, tune
from hybridtrainer.errors import RunFolderError
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
        identity = Identity(kept, arms, options.grid)
        runner = _Runner(folder, options, progress, build, stop, identity)
        tuning: dict[str, Any] | None = None
        warnings: list[str] = []
        if options.grid is not None:
            arms, tuning, warnings = tune(arms, options.grid, options.target, runner.candidates)
        trials = runner.trials(arms)
        result = findings(arms, trials, options.metric, options.target, options.tolerance, options.target_origin)
        if tuning is None:
            warnings = ["The arms were not tuned: with --tune the verdict may be another."]
        result["warnings"] = warnings + result["warnings"]
        result |= {"name": folder.name, "tuned": tuning is not None, "tuning": tuning, "environment": environment()}
        result = finite(result)
        kept.write_json("result.json", result)
    return result


def _open(folder: Path) -> RunFolder:
    if (folder / "log.jsonl").exists():
        raise RunFolderError(f"{folder} holds a run, not a comparison.", "Give the comparison another name with --run.")
    return RunFolder(folder, keep_last=1, resume=True)


class _Runner:
    """Makes the trials that are not there yet."""

    def __init__(
        self, folder: Path, options: Options, progress: Progress, build: Build, stop: StopRequest, identity: Identity
    ) -> None:
        self._folder = folder
        self._options = options
        self._overall = Overall(progress)
        self._build = build
        self._stop = stop
        self._identity = identity
        self._warm: set[str] = set()

    def trials(self, arms: Sequence[Arm]) -> dict[str, list[TrialResult]]:
        """Every arm with every seed, all arms of a seed in turns."""
        rounds = [
            [self._trial(arm, seed, self._folder / "trials" / _trial_name(arm, seed)) for arm in arms]
            for seed in range(self._options.first_seed, self._options.first_seed + self._options.seeds)
        ]
        self._make(rounds, "seed")
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
        self._make([[trial] for trial in made.values()], f"tuning {arm.name}, candidate")
        return {candidate: self._tuning_curve(trial) for candidate, trial in made.items()}

    def _tuning_curve(self, trial: Trial) -> Curve | None:
        result = trial.result()
        assert result is not None
        if result.status == "diverged":
            return None
        return result.curves[choose_metric([result], self._options.metric)]

    def _trial(self, arm: Arm, seed: int, folder: Path) -> Trial:
        return Trial(arm, seed, folder, self._build, self._overall.part(), self._identity.accept_data)

    def _make(self, rounds: Sequence[Sequence[Trial]], what: str) -> None:
        left = [[trial for trial in one_round if trial.result() is None] for one_round in rounds]
        if not any(left):
            return
        self._overall.start(sum(trial.arm.config.train.steps for one_round in left for trial in one_round))
        try:
            for number, one_round in enumerate(left):
                if one_round:
                    names = ", ".join(trial.arm.name for trial in one_round)
                    self._overall.shown.message(f"{what} {number + 1} of {len(left)} ({names})")
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
            running = list(trials)
            while running:
                running = [trial for trial in running if not self._turn(trial)][::-1]
                if self._stop.signal is not None and running:
                    for trial in running:
                        trial.pause(self._stop.signal)
                    raise StoppedError(self._stop.signal)

    def _turn(self, trial: Trial) -> bool:
        return trial.advance(trial.arm.config.train.eval_interval, self._stop)

    def _warm_up(self, arm: Arm) -> None:
        """Some steps that are thrown away: the first ones of a process are slower than the others."""
        if arm.name in self._warm:
            return
        self._warm.add(arm.name)
        task = self._build(arm.config)
        self._identity.accept_data(arm.name, task.data_digest())
        for batch, _ in zip(task.loader, range(WARM_UP_STEPS * task.trainer.accumulate), strict=False):
            task.trainer.step([batch] * task.trainer.accumulate if task.trainer.accumulate > 1 else batch)
        task.trainer.evaluate(task.validation[:1])


def _trial_name(arm: Arm, seed: int) -> str:
    """An arm that is tuned anew, for another target, may be another one: its trials are kept apart."""
    return "-".join(part for part in (arm.name, arm.variant, f"seed{seed}") if part)
