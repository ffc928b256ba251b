"""How numbers are read out of the result files, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from benchmarks.record import result

Figures = dict[str, list[str]]


def gb(count: float) -> float:
    return count / 1e9


def at_most(value: float, digits: int) -> str:
    """The least number of so many digits that is not below the value: what "within" may say."""
    return f"{math.ceil(round(value * 10**digits, 9)) / 10**digits:.{digits}f}"


def span(values: Iterable[float], form: str) -> str:
    """The least and the most, as "1.2 to 1.3"."""
    values = list(values)
    return f"{min(values):{form}} to {max(values):{form}}"


def speed(study: str, arm: str, baseline: str) -> dict[str, float]:
    """How many times as fast an arm of a study of foresight was to the target: mean, low and high."""
    (found,) = [
        row["speedup"]
        for row in result(f"foresight_{study}")["comparisons"]
        if (row["arm"], row["baseline"]) == (arm, baseline)
    ]
    return dict(found)


def times(study: str, arm: str, baseline: str) -> str:
    return f"{speed(study, arm, baseline)['mean']:.2f}"


def interval(study: str, arm: str, baseline: str) -> str:
    found = speed(study, arm, baseline)
    return f"{found['low']:.2f} to {found['high']:.2f}"


def final(study: str, arm: str) -> float:
    return fmean(trial["final"] for trial in result(f"foresight_{study}")["arms"][arm]["trials"])


def missed(study: str, arm: str) -> int:
    """Seeds in which the target was not reached."""
    return sum(trial["reached"] is None for trial in result(f"foresight_{study}")["arms"][arm]["trials"])


def steps_saved(study: str) -> float:
    """How many times as fast samples were, counted in steps."""
    arms = result(f"foresight_{study}")["arms"]
    return float(arms["averaged"]["average"]["step"] / arms["samples"]["average"]["step"])


IMAGES = ("fashion_mnist", "fashion_mnist_small", "mnist")
WORDS = ("none", "one", "two", "three", "four", "five")


def fewer_backward(task: str) -> float:
    """Share of the backward passes that jumps saved."""
    found = result("jumps")
    return 1 - fmean(run["real_steps"] for run in found["runs"][task]["conservative"]) / int(found["steps"])


def loss_change(task: str) -> float:
    """Loss with jumps against plain, in pairs of runs from the same seed."""
    arms = result("jumps")["runs"][task]
    return fmean(
        ours["loss"] / plain["loss"] - 1 for ours, plain in zip(arms["conservative"], arms["plain"], strict=True)
    )


FORECAST_RUNS: dict[str, dict[str, Any]] = result("forecasts")["runs"]
OTHERS = ("persistence", "linear trend", "power law")


def geometric(other: str) -> list[float]:
    """Error over that of a simple forecaster, for each horizon."""
    return [
        math.exp(fmean(math.log(run[f"ratio to {other}"][horizon]) for run in FORECAST_RUNS.values()))
        for horizon in range(3)
    ]


def worst_ratios() -> list[float]:
    """For each run and horizon the highest of the three ratios."""
    return [max(run[f"ratio to {other}"][i] for other in OTHERS) for run in FORECAST_RUNS.values() for i in range(3)]


def held() -> str:
    return span((fmean(run["coverage"]) for run in FORECAST_RUNS.values()), ".2f")


def uncertain(other: str) -> list[int]:
    """In how many runs the interval of the ratio contains 1, for each horizon."""
    name = f"90% interval of the ratio to {other}"
    return [sum(run[name][i][0] < 1 < run[name][i][1] for run in FORECAST_RUNS.values()) for i in range(3)]
