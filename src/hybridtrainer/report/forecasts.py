"""Forecasts of the loss beside what happened. Reads records and a curve, draws nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hybridtrainer.report.downsample import value_at
from hybridtrainer.report.values import number


@dataclass(frozen=True)
class Forecast:
    """A forecast of the smoothed training loss, with its 90% interval and what came of it.

    Attributes:
        step: When it was made.
        target_step: For when.
        loss: The forecast.
        low: Lower end of the interval.
        high: Upper end.
        actual: The smoothed loss at the target; None where the run has not got there.
    """

    step: float
    target_step: float
    loss: float
    low: float | None
    high: float | None
    actual: float | None

    @property
    def inside(self) -> bool | None:
        """Whether what happened lay in the interval; None where either is not known."""
        if self.actual is None or self.low is None or self.high is None:
            return None
        return self.low <= self.actual <= self.high


@dataclass(frozen=True)
class Forecasts:
    """All forecasts of a run: of a point shortly ahead, and of the end."""

    short: list[Forecast]
    final: list[Forecast]


def forecasts(records: Iterable[Mapping[str, Any]], smoothed: Sequence[tuple[float, float]]) -> Forecasts:
    """The forecasts in the records of a log, each with what happened.

    Two are written at a time; the one that looks further is that of the end. Shortly before the end both are about
    it, and one of them is enough. `smoothed` is the smoothed training loss by step, rising in step. A forecast that
    names a window is held against the mean loss of that many steps.
    """
    records = list(records)
    found: list[Forecast] = []
    near: list[Forecast] = []
    losses = {
        step: loss
        for record in records
        if record.get("kind") == "step" and not number(record.get("predicted"))
        if (step := number(record.get("step"))) is not None and (loss := number(record.get("loss"))) is not None
    }
    last = max(losses, default=0.0)
    for record in records:
        if record.get("kind") != "forecast":
            continue
        step, target, loss = (number(record.get(name)) for name in ("step", "target_step", "loss"))
        if step is None or target is None or loss is None or target <= step:
            continue
        low, high = number(record.get("low")), number(record.get("high"))
        window = number(record.get("window"))
        meant = [losses[at] for at in _steps(target, window) if at in losses] if window and target <= last else []
        actual = value_at(smoothed, target) if window is None else fmean(meant) if meant else None
        (found if window is None else near).append(Forecast(step, target, loss, low, high, actual))
    end = max((forecast.target_step for forecast in found), default=0.0)
    final = {known.step: known for known in found if known.target_step >= end}
    near += [known for known in found if known.target_step < end]
    return Forecasts(
        short=sorted(near, key=lambda known: known.target_step),
        final=[final[step] for step in sorted(final)],
    )


def _steps(target: float, window: float) -> range:
    return range(int(target) - int(window) + 1, int(target) + 1)


def coverage(found: Iterable[Forecast]) -> tuple[int, int]:
    """How many of the forecasts held what happened in their interval, and how many could be judged."""
    judged = [known.inside for known in found if known.inside is not None]
    return sum(judged), len(judged)
