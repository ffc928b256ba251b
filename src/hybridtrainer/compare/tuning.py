"""The same search for every arm: learning rate, schedule and length, on a seed that is not compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridtrainer.compare.arms import Arm
from hybridtrainer.compare.curve import WINDOW, Curve
from hybridtrainer.compare.options import OPTIONS, Candidate, Grid
from hybridtrainer.compare.verdict import level
from hybridtrainer.errors import ConfigError, Problem

TUNING_SEED = 1_000_003
EXTENSIONS = 2  # how often the grid may grow beyond its edges
STEP = 2.0  # between neighbouring rates beyond the edge


Findings = Mapping[Candidate, Curve | None]
"""The curve of each candidate of one arm; None where it diverged."""


def tune(
    arms: Sequence[Arm],
    grid: Grid,
    target: float | None,
    run: Callable[[Arm, Sequence[Candidate]], Findings],
) -> tuple[list[Arm], dict[str, Any], list[str]]:
    """Gives every arm its best candidate of a grid that grows, for all, where one arm's best rate is at its edge.

    Args:
        arms: What to tune.
        grid: What to try.
        target: The metric to reach; what the best baseline reaches at full length where it is None.
        run: Trains candidates of an arm; those it was asked for before it has kept.

    Returns:
        The tuned arms, what was tried and chosen, and what the reader should be warned of.
    """
    warnings: list[str] = []
    if not all(math.isfinite(arm.config.optimizer.lr * rate) for arm in arms for rate in grid.rates):
        raise ConfigError("The tuning grid", [Problem("tune-lr", "has a rate beyond all numbers.")], OPTIONS)
    for extension in range(EXTENSIONS + 1):
        findings = {arm.name: run(arm, grid.candidates()) for arm in arms}
        goal = target if target is not None else _goal(arms, findings)
        chosen = {arm.name: choose(findings[arm.name], goal) for arm in arms}
        at_edge = {arm.name: chosen[arm.name].rate in (min(grid.rates), max(grid.rates)) for arm in arms}
        wider = _wider(grid, (candidate.rate for candidate in chosen.values()))
        if wider == grid:
            break
        if extension == EXTENSIONS:
            names = ", ".join(name for name, edge in at_edge.items() if edge)
            warnings.append(
                f"The best learning rate of {names} is at the edge of the grid: widen it with --tune-lr, in a "
                "folder of its own (--run): the grid of this one is fixed."
            )
            break
        grid = wider
    tuned = [replace(arm, config=chosen[arm.name].apply(arm.config), variant=chosen[arm.name].name) for arm in arms]
    report = {
        "budget": len(grid.candidates()),
        "arms": {arm.name: _account(arm, findings[arm.name], chosen[arm.name], goal) for arm in arms},
    }
    return tuned, report, warnings


def choose(findings: Findings, goal: float | None) -> Candidate:
    """The candidate that reaches the goal with the least compute, or comes nearest to it if none does.

    Compute, not time: within one arm they say the same, and compute has no noise.

    Raises:
        ConfigError: if every candidate diverged.
    """
    sound = {candidate: curve for candidate, curve in findings.items() if curve is not None and curve.final()}
    if not sound and any(curve is not None for curve in findings.values()):
        problem = Problem("train.steps", f"is too short: a run needs at least {WINDOW} evaluations.", "Raise it.")
        raise ConfigError("The tuning grid", [problem])
    if not sound:
        problem = Problem("optimizer.lr", "diverges at every rate that was tried.", "Lower it.")
        raise ConfigError("The tuning grid", [problem])
    costs = {
        candidate: reached.compute
        for candidate, curve in sound.items()
        if goal is not None and (reached := curve.reached(goal))
    }
    if costs:
        return min(costs, key=costs.__getitem__)
    return max(sound, key=lambda candidate: _quality(sound[candidate]))


def _goal(arms: Sequence[Arm], findings: Mapping[str, Findings]) -> float | None:
    """The best of what the baselines reach at full length."""
    curves = [
        curve
        for arm in arms
        if arm.role == "baseline"
        for candidate, curve in findings[arm.name].items()
        if candidate.length == 1.0 and curve is not None
    ]
    values = [value for curve in curves if (value := level(curve)) is not None]
    if not values:
        return None
    return max(values) if curves[0].higher_is_better else min(values)


def _quality(curve: Curve) -> float:
    final = curve.final()
    assert final is not None
    return final.value if curve.higher_is_better else -final.value


def _wider(grid: Grid, chosen: Iterable[float]) -> Grid:
    """The grid with a rate beyond each edge that was chosen; one with a single rate was not meant to search."""
    if len(grid.rates) == 1:
        return grid
    rates = set(grid.rates)
    for rate in chosen:
        if rate == max(grid.rates):
            rates.add(rate * STEP)
        if rate == min(grid.rates):
            rates.add(rate / STEP)
    return replace(grid, rates=tuple(sorted(rates)))


def _account(arm: Arm, findings: Findings, chosen: Candidate, goal: float | None) -> dict[str, Any]:
    return {
        "chosen": _settings(arm, chosen),
        "candidates": [
            {
                "settings": _settings(arm, candidate),
                "status": "diverged" if curve is None else "finished",
                "final": (end := curve.final()) and end.value if curve else None,
                "seconds_to_target": reached.seconds
                if curve and goal is not None and (reached := curve.reached(goal))
                else None,
            }
            for candidate, curve in findings.items()
        ],
    }


def _settings(arm: Arm, candidate: Candidate) -> dict[str, Any]:
    config = candidate.apply(arm.config)
    return {
        "optimizer.lr": config.optimizer.lr,
        "schedule.name": config.schedule.name,
        "train.steps": config.train.steps,
    }
