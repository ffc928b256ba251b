"""What came out of a comparison, as the document that is written to `result.json`. Nothing is trained here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from hybridtrainer.compare.arms import EVALUATIONS, Arm
from hybridtrainer.compare.average import AverageRun, Seeds, average_moment
from hybridtrainer.compare.claim import TARGET_AT
from hybridtrainer.compare.curve import HOLD, WINDOW, Curve, Point
from hybridtrainer.compare.options import HIGHER_IS_BETTER
from hybridtrainer.compare.trial import TrialResult
from hybridtrainer.compare.verdict import Comparison, judge, level, median_target
from hybridtrainer.errors import ConfigError, Problem

VERSION = 1
FEW_SEEDS = 5
FEW_EVALUATIONS = 4 * WINDOW
FALLING_RATE = "learning rate will fall"  # as the phase policy says it

Trials = Mapping[str, Sequence[TrialResult]]


def findings(
    arms: Sequence[Arm],
    trials: Trials,
    metric: str | None,
    given: float | None,
    tolerance: float,
    given_by: str = "given",
) -> dict[str, Any]:
    """Judges every challenger against every baseline.

    Args:
        arms: What was compared; the first baseline gives the target where there is none.
        trials: What each arm's trials found, in the order of the seeds.
        metric: Which one decides; `choose_metric` does where it is None.
        given: The target; what the first baseline's median run reaches where it is None.
        tolerance: Share of the metric that counts as no loss of quality.
        given_by: Who gave the target, in words.
    """
    metric = choose_metric([trial for found in trials.values() for trial in found], metric)
    curves = {name: [_curve(trial, metric) for trial in found] for name, found in trials.items()}
    baselines = [arm for arm in arms if arm.role == "baseline"]
    levels = [level(curve) for curve in curves[baselines[0].name]]

    def target_of(seeds: Seeds) -> float | None:
        if given is not None:
            return given
        return median_target([levels[seed] for seed in seeds], tolerance, HIGHER_IS_BETTER[metric])

    target = target_of(tuple(range(len(levels))))
    origin = given_by
    if given is None:
        eased = "less" if HIGHER_IS_BETTER[metric] else "plus"
        origin = f"median of {baselines[0].name} at {TARGET_AT:.0%} of its run, {eased} {tolerance:.1%}"
    median_of = baselines[0].name if given is None else ""
    pairs = [(arm, baseline) for arm in arms if arm.role == "challenger" for baseline in baselines]
    judged = [
        (
            arm,
            baseline,
            judge(
                arm.name,
                baseline.name,
                curves[arm.name],
                curves[baseline.name],
                target_of,
                tolerance,
                metric,
                median_of,
            ),
        )
        for arm, baseline in pairs
    ]
    return {
        "v": VERSION,
        "kind": "comparison",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "headline": _headline(judged, curves, target),
        "warnings": _warnings(arms, trials, curves, target, baselines[0].name),
        "metric": {"name": metric, "higher_is_better": HIGHER_IS_BETTER[metric]},
        "target": {"value": target, "origin": origin},
        "smoothing": {"window": WINDOW, "hold": HOLD},
        "tolerance": tolerance,
        "seeds": [trial.seed for trial in trials[arms[0].name]],
        "arms": {
            arm.name: {
                "role": arm.role,
                "config": arm.settings(),
                "average": _average(curves[arm.name], target),
                "trials": [
                    _trial(trial, curve, target)
                    for trial, curve in zip(trials[arm.name], curves[arm.name], strict=True)
                ],
            }
            for arm in arms
        },
        "comparisons": [
            {"arm": arm.name, "baseline": baseline.name, **comparison.to_dict()} for arm, baseline, comparison in judged
        ],
    }


def choose_metric(trials: Sequence[TrialResult], wanted: str | None) -> str:
    """The metric that decides: the one asked for, else accuracy where it is measured, else loss.

    Raises:
        ConfigError: if the one asked for was not measured.
    """
    measured = sorted({name for trial in trials for name in trial.curves})
    if wanted is None:
        return "accuracy" if "accuracy" in measured else "loss"
    if measured and wanted not in measured:
        problem = Problem("metric", f"is {wanted}, and these runs measured {' and '.join(measured)}.")
        raise ConfigError("The comparison", [problem])
    return wanted


def _curve(trial: TrialResult, metric: str) -> Curve:
    """The curve of a trial; an empty one where it diverged before its first evaluation."""
    return trial.curves.get(metric) or Curve((), HIGHER_IS_BETTER[metric], trial.status == "diverged")


def finite(document: dict[str, Any]) -> dict[str, Any]:
    """The document without numbers that JSON does not have: they become null."""
    return {key: _finite(value) for key, value in document.items()}


def _finite(document: Any) -> Any:
    if isinstance(document, dict):
        return finite(document)
    if isinstance(document, list | tuple):
        return [_finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def _headline(
    judged: Sequence[tuple[Arm, Arm, Comparison]], curves: Mapping[str, Sequence[Curve]], target: float | None
) -> str:
    """For each challenger what is said of it against the strongest baseline.

    That is the first to reach the target; where none does, the one that ends best: a bound against a weaker one, which
    may be far above what holds for the other, is no headline.
    """

    def strength(baseline: Arm) -> tuple[float, float]:
        runs = curves[baseline.name]
        reached = None if target is None else average_moment(runs, target)
        return -math.inf if reached is None else -reached.seconds, _end(runs)

    strongest: dict[str, tuple[Arm, Arm, Comparison]] = {}
    for entry in judged:
        known = strongest.get(entry[0].name)
        if known is None or strength(entry[1]) > strength(known[1]):
            strongest[entry[0].name] = entry
    return " ".join(comparison.sentence for _, _, comparison in strongest.values())


def _end(runs: Sequence[Curve]) -> float:
    """How good these runs are on average when they end: more is better, and nothing is worse than a broken one."""
    finals = [end.value if run.higher_is_better else -end.value for run in runs if (end := run.final())]
    return -math.inf if any(run.broken for run in runs) else fmean(finals)


def _warnings(
    arms: Sequence[Arm],
    trials: Trials,
    curves: Mapping[str, Sequence[Curve]],
    target: float | None,
    baseline: str,
) -> list[str]:
    found: list[str] = []
    seeds = len(trials[baseline])
    if seeds < FEW_SEEDS:
        few = "1 seed is few: there are no intervals" if seeds == 1 else f"{seeds} seeds are few: intervals are wide"
        found.append(f"{few}, and nothing is proven. Use at least {FEW_SEEDS}.")
    intervals = sorted({arm.asked_interval for arm in arms if arm.asked_interval > arm.config.train.eval_interval})
    if intervals:
        found.append(
            f"Evaluations were made every {_steps(arms[0].config.train.eval_interval)}, not every "
            f"{' or '.join(map(str, intervals))} as configured: to see when a target is reached a comparison makes at "
            f"least {EVALUATIONS} in each run, at the same steps in all arms."
        )
    if any(len(curve.points) < FEW_EVALUATIONS for found_curves in curves.values() for curve in found_curves):
        found.append(
            f"Some runs have fewer than {FEW_EVALUATIONS} evaluations: too few to see when a target is reached. "
            "Train longer, or lower train.eval_interval."
        )
    for arm in arms:
        diverged = [trial for trial in trials[arm.name] if trial.status == "diverged"]
        if diverged:
            found.append(f"{arm.name} diverged in {len(diverged)} of {seeds} seeds: {diverged[0].reason}")
        found += _jumpless(arm, trials[arm.name])
    average = AverageRun(curves[baseline], lambda point: point.seconds)
    if target is not None and average.reached(tuple(range(seeds)), target) is None:
        finals = [end.value for curve in curves[baseline] if (end := curve.final())]
        hint = f": its median run ends at {median(finals):.4g}" if finals else ""
        found.append(
            f"{baseline} does not reach the target {target:.4g}{hint}. Another --target needs no new training."
        )
    return found


def _jumpless(arm: Arm, trials: Sequence[TrialResult]) -> list[str]:
    """What has to be said of an arm that was to jump and never did."""
    if arm.role == "baseline" or not arm.config.jumps_allowed() or any(trial.jumps for trial in trials):
        return []
    told = f"{arm.name} kept no jump in any of its runs."
    why = next((trial.no_jump for trial in trials if trial.no_jump), "")
    if why:
        told += f" Its log says: {why}."
    if arm.config.predict == "auto" and FALLING_RATE in why:
        told += (
            " Compare with --set schedule.name=constant, or with --set 'predict=[\"jumps\"]', which jumps anyway; "
            "give it a folder of its own with --run."
        )
    return [told]


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _average(curves: Sequence[Curve], target: float | None) -> dict[str, float] | None:
    """The average run's own way to the target; null where it does not get there."""
    reached = None if target is None else average_moment(curves, target)
    return None if reached is None else _moment(reached)


def _moment(reached: Point) -> dict[str, float]:
    return {
        "step": reached.step,
        "seconds": reached.seconds,
        "forward_samples": reached.forward_samples,
        "backward_samples": reached.backward_samples,
    }


def _trial(trial: TrialResult, curve: Curve, target: float | None) -> dict[str, Any]:
    last = curve.points[-1] if curve.points else None
    final = curve.final()
    reached = curve.reached(target) if target is not None else None
    smoothed = [None] * (len(curve.points) - len(curve.smoothed)) + [point.value for point in curve.smoothed]
    return {
        "seed": trial.seed,
        "folder": f"{trial.folder.parent.name}/{trial.folder.name}",
        "status": trial.status,
        "reason": trial.reason,
        "steps": last.step if last else 0,
        "training_seconds": last.seconds if last else 0.0,
        "evaluation_seconds": trial.evaluation_seconds,
        "forward_samples": last.forward_samples if last else 0,
        "backward_samples": last.backward_samples if last else 0,
        "jumps_kept": trial.jumps,
        "final": final.value if final else None,
        "reached": reached and _moment(reached),
        "curve": [vars(point) | {"smoothed": value} for point, value in zip(curve.points, smoothed, strict=True)],
    }
