"""The result of a comparison as plain data for the page. Reads one file, decides nothing: the verdicts are in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from hybridtrainer.errors import RunFolderError
from hybridtrainer.report.downsample import Point, value_at
from hybridtrainer.report.values import number

VERSION = 1

Number = Annotated[float | None, BeforeValidator(number)]
Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else str(value))]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Estimate(_Part):
    """A figure over all seeds: mean, 95% interval (empty with too few seeds), and one value for each seed."""

    mean: Number = None
    low: Number = None
    high: Number = None
    per_seed: list[Number] = []
    seconds: Number = None
    steps: Number = None


class Reached(_Part):
    """When a trial, or the average run of an arm, reached the target."""

    step: Number = None
    seconds: Number = None
    forward_samples: Number = None
    backward_samples: Number = None


class Measurement(_Part):
    """One evaluation of a trial."""

    step: Number = None
    seconds: Number = None
    value: Number = None
    smoothed: Number = None


class Trial(_Part):
    """One run of one arm."""

    seed: int
    folder: Text = ""
    status: Text = ""
    reason: Text = ""
    steps: Number = None
    training_seconds: Number = None
    evaluation_seconds: Number = None
    forward_samples: Number = None
    backward_samples: Number = None
    final: Number = None
    reached: Reached | None = None
    curve: list[Measurement] = []


class Arm(_Part):
    """One of the ways to train that are compared; results of old versions have no `average`."""

    role: Text = ""
    config: dict[str, Any] = {}
    average: Reached | None = None
    trials: list[Trial] = []


class Versus(_Part):
    """One arm against one baseline; results of old versions have no bounds (`at_least`)."""

    arm: Text
    baseline: Text
    verdict: Text = "no verdict"
    sentence: Text = ""
    speedup: Estimate | None = None
    compute: Estimate | None = None
    at_least: Estimate | None = None
    compute_at_least: Estimate | None = None
    final_quality: Estimate | None = None
    equal_time: Estimate | None = None
    equal_steps: Estimate | None = None


class Metric(_Part):
    """What quality means here."""

    name: Text = "loss"
    higher_is_better: bool = False


class Target(_Part):
    """The quality that is to be reached."""

    value: Number = None
    origin: Text = ""


class Smoothing(_Part):
    """How curves were smoothed: the window, and for how many evaluations the target has to hold."""

    window: Number = None
    hold: Number = None


class Candidate(_Part):
    """One combination of settings that tuning tried."""

    settings: dict[str, Any] = {}
    final: Number = None
    seconds_to_target: Number = None
    status: Text = ""


class TunedArm(_Part):
    """What tuning did for one arm."""

    chosen: dict[str, Any] = {}
    candidates: list[Candidate] = []


class Tuning(_Part):
    """What tuning did."""

    budget: Number = None
    arms: dict[str, TunedArm] = {}


class Comparison(_Part):
    """A whole result.json."""

    v: int
    kind: str
    name: Text = "comparison"
    date: Text = ""
    headline: Text
    warnings: list[Text] = []
    metric: Metric = Metric()
    target: Target = Target()
    smoothing: Smoothing = Smoothing()
    seeds: list[int] = []
    tuned: bool = False
    tuning: Tuning | None = None
    arms: dict[str, Arm]
    comparisons: list[Versus] = []
    environment: dict[str, Any] = {}


def read_comparison(folder: Path) -> Comparison:
    """Reads the result of a comparison.

    Raises:
        RunFolderError: if it cannot be read, is damaged, or has another version.
    """
    path = folder / "result.json"
    again = "Make it again with `hybridtrainer compare`, or restore it from a copy."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}.", "Check that you may read it.") from error
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} is damaged: {error}.", again) from error
    if not isinstance(content, dict) or content.get("kind") != "comparison":
        raise RunFolderError(f"{path} is not the result of a comparison.", "Name the folder of a comparison.")
    if content.get("v") != VERSION:
        raise RunFolderError(
            f"{path} has version {content.get('v')!r}; this program reads {VERSION}.",
            "Use the version of hybridtrainer that wrote it.",
        )
    try:
        return Comparison.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RunFolderError(f"{path} is damaged at {where}: {first['msg']}.", again) from error


def trial_curve(trial: Trial, by: str, *, smoothed: bool) -> list[Point]:
    """Quality of one trial over "seconds" or over "step"."""
    points: list[Point] = []
    for measured in trial.curve:
        x = measured.seconds if by == "seconds" else measured.step
        if x is not None:
            points.append((x, measured.smoothed if smoothed else measured.value))
    return points


def mean_curve(trials: Sequence[Trial], by: str, points: int = 120) -> list[Point]:
    """Mean of the smoothed quality over all seeds, only where every seed that finished has a value.

    A mean over those that happen to have got so far would bend where one of them ends.
    """
    curves = [
        sorted((x, y) for x, y in trial_curve(trial, by, smoothed=True) if y is not None)
        for trial in trials
        if trial.status != "diverged"
    ]
    curves = [curve for curve in curves if curve]
    if not curves:
        return []
    begin, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if end <= begin:
        return []
    mean: list[Point] = []
    for at in range(points):
        x = min(end, begin + (end - begin) * at / (points - 1))
        heights = [height for curve in curves if (height := value_at(curve, x)) is not None]
        mean.append((x, sum(heights) / len(heights)))
    return mean
