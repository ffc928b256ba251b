"""From what was typed to arms, options and a folder: every mistake is found before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from hybridtrainer.compare.arms import Arm, named_arms, plain_and_hybrid
from hybridtrainer.compare.options import OPTIONS, Grid, Options
from hybridtrainer.config import RunConfig
from hybridtrainer.config_io import load_config
from hybridtrainer.errors import ConfigError, Problem
from hybridtrainer.named_tasks import NAMED_TASKS
from hybridtrainer.run_folder import run_path


@dataclass(frozen=True)
class Request:
    """What to compare, how, and where it is kept."""

    arms: list[Arm]
    options: Options
    folder: Path

    def plan(self) -> str:
        """What will be trained, in one line: arms, seeds, steps in all."""
        names, grid = [arm.name for arm in self.arms], self.options.grid
        seeds = "1 seed" if self.options.seeds == 1 else f"{self.options.seeds} seeds each"
        steps = sum(arm.config.train.steps for arm in self.arms) * self.options.seeds
        told = f"{', '.join(names[:-1])} and {names[-1]}, {seeds}, {steps:,} steps in all"
        if grid is not None:
            tried = [candidate.apply(arm.config).train.steps for arm in self.arms for candidate in grid.candidates()]
            told += (
                f" at full length; before that {len(grid.candidates())} candidates are tried for every arm, "
                f"{sum(tried):,} steps or more"
            )
        return f"{told}; what is there already is not trained again"

    def tuned(self, rates: str | None = None, schedules: str | None = None, lengths: str | None = None) -> Self:
        """The same with a search before it; each argument is a list with commas, the default where left out."""
        grid = Grid()
        if rates is not None:
            grid = replace(grid, rates=_numbers("tune-lr", rates))
        if schedules is not None:
            grid = replace(grid, schedules=tuple(part.strip() for part in schedules.split(",")))
        if lengths is not None:
            grid = replace(grid, lengths=_numbers("tune-length", lengths))
        return replace(self, options=replace(self.options, grid=grid))


def read_request(
    configs: Sequence[Path],
    overrides: Sequence[str],
    seeds: int,
    target: str | None,
    metric: str | None,
    tolerance: float,
    whole_runs: bool,
    name: str | None,
) -> Request:
    """Reads configurations and options.

    Args:
        configs: Files or named tasks. One is compared with plain training; of several the first is the baseline.
        overrides: Settings for all of them.
        seeds: How many.
        target: A number, "median", or None for the named task's own target where it has one.
        metric: Which metric decides.
        tolerance: Share of the metric that is no loss of quality.
        whole_runs: Train one run after the other.
        name: Of the folder.

    Raises:
        ConfigError: with everything that is wrong.
        RunFolderError: for a name that cannot be one.
    """
    if not configs:
        hint = f"Name a file, or a task: {', '.join(NAMED_TASKS)}."
        raise ConfigError("The command line", [Problem("CONFIG", "is missing.", hint)], OPTIONS)
    first = configs[0]
    config = load_config(first, overrides)
    _refuse_plans([(path, load_config(path, overrides)) for path in configs])
    if len(configs) > 1:
        arms = named_arms([(path.stem, load_config(path, overrides)) for path in configs])
        known = None
    else:
        arms = plain_and_hybrid(config)
        known = NAMED_TASKS.get(str(first))
    measured = "accuracy" if config.model.name.startswith("cnn") else "loss"
    if metric == "accuracy" and measured == "loss":
        problem = Problem("metric", "is accuracy, and text models are measured by loss.")
        raise ConfigError("The comparison", [problem], OPTIONS)
    value, origin = _target(target), "given"
    if target is None and known is not None and metric != "loss":
        value, origin = known.target, f"that of the task {first}"
    options = Options(seeds, config.seed, value, metric, tolerance, whole_runs=whole_runs, target_origin=origin)
    return Request(arms, options, run_path(config.run.folder, f"compare-{first.stem}" if name is None else name))


def _refuse_plans(configs: Sequence[tuple[Path, RunConfig]]) -> None:
    """Arms that plan by themselves, on a machine that is more or less busy, would not be the same from seed to seed."""
    problems = [
        Problem("memory.mode", f'is "auto" in {path}.', "Put in what `hybridtrainer plan` says.")
        for path, config in configs
        if config.memory.mode == "auto"
    ]
    if problems:
        raise ConfigError("The comparison", problems, "Settle the memory of every arm before they are compared.")


def _target(text: str | None) -> float | None:
    if text is None or text == "median":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError("The command line", [Problem("target", f'is {text!r}, not a number or "median".')], OPTIONS)
    return value


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        problem = Problem(option, f"is {text!r}, not numbers with commas between them.")
        raise ConfigError("The command line", [problem], OPTIONS) from error
