"""How to compare, and what to try before: plain values, checked when they are made."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from hybridtrainer.config import RunConfig, ScheduleConfig
from hybridtrainer.errors import ConfigError, Problem

HIGHER_IS_BETTER = {"accuracy": True, "loss": False}
"""The metrics that can decide."""
MOST_SEEDS = 1000
OPTIONS = "Correct what is named above; `hybridtrainer compare --help` explains every option."
"""The remedy for mistakes that no file holds."""


@dataclass(frozen=True)
class Grid:
    """What is tried: factors of the configured rate and of the configured length, and schedules by name."""

    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    schedules: tuple[str, ...] = ("constant", "cosine")
    lengths: tuple[float, ...] = (1.0, 0.6)

    def __post_init__(self) -> None:
        problems = [
            Problem(f"tune-{name}", f"is {_listed(values)}; it must be positive numbers.")
            for name, values in (("lr", self.rates), ("length", self.lengths))
            if not values or not all(0 < value < float("inf") for value in values)
        ]
        known = get_args(ScheduleConfig.model_fields["name"].annotation)
        if not self.schedules or not set(self.schedules) <= set(known):
            problems.append(Problem("tune-schedule", f"is {_listed(self.schedules)}; choose from {', '.join(known)}."))
        if self.lengths and 1.0 not in self.lengths:
            problems.append(Problem("tune-length", "must have 1: the target comes from runs of full length."))
        if problems:
            raise ConfigError("The tuning grid", problems, OPTIONS)

    def candidates(self) -> list[Candidate]:
        """Every combination."""
        return [Candidate(*values) for values in itertools.product(self.rates, self.schedules, self.lengths)]


@dataclass(frozen=True)
class Candidate:
    """One combination of the grid."""

    rate: float
    schedule: str
    length: float

    @property
    def name(self) -> str:
        """For folders: digits, dots, dashes and letters."""
        return f"rate{self.rate!r}-{self.schedule}-length{self.length!r}".replace(".0-", "-").removesuffix(".0")

    def apply(self, config: RunConfig) -> RunConfig:
        """The configuration with this combination's rate, schedule and length."""
        steps = max(1, round(config.train.steps * self.length))
        schedule: dict[str, Any] = {
            "name": self.schedule,
            "warmup_steps": min(config.schedule.warmup_steps, steps - 1),
        }
        if self.schedule == "constant":
            schedule["final_ratio"] = ScheduleConfig.model_fields["final_ratio"].default
        return config.model_copy(
            update={
                "optimizer": config.optimizer.model_copy(update={"lr": config.optimizer.lr * self.rate}),
                "schedule": config.schedule.model_copy(update=schedule),
                "train": config.train.model_copy(update={"steps": steps}),
            }
        )


@dataclass(frozen=True)
class Options:
    """How to compare.

    Attributes:
        seeds: How many.
        first_seed: The first of them; the others follow it.
        target: The metric to be reached; what the first baseline's median run reaches where it is None.
        metric: "accuracy" or "loss"; accuracy where there is one if it is None.
        tolerance: Share of the metric that counts as no loss of quality.
        grid: What to try for every arm first; nothing where it is None.
        whole_runs: Train one run after the other instead of all arms of a seed in turns: needs the memory of one
            arm only, and shows more of the machine's noise.
        target_origin: Who gave the target, in words.
    """

    seeds: int = 5
    first_seed: int = 0
    target: float | None = None
    metric: str | None = None
    tolerance: float = 0.002
    grid: Grid | None = None
    whole_runs: bool = False
    target_origin: str = "given"

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.seeds <= MOST_SEEDS:
            message = f"is {self.seeds}; it must be 1 to {MOST_SEEDS}, and 5 or more for a verdict to trust."
            problems.append(Problem("seeds", message))
        if self.metric is not None and self.metric not in HIGHER_IS_BETTER:
            problems.append(Problem("metric", f"is {self.metric!r}, not one of {', '.join(HIGHER_IS_BETTER)}."))
        if not 0 <= self.tolerance < 1:
            problems.append(Problem("tolerance", f"is {self.tolerance}; it must be a share, 0 to less than 1."))
        if problems:
            raise ConfigError("The comparison", problems, OPTIONS)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "empty"
