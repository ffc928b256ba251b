"""The result of a comparison as a page of text."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from hybridtrainer.sizes import rounded_down

BOUNDS = ("at_least", "compute_at_least")


def summary(result: dict[str, Any], folder: Path) -> str:
    """Verdict first, then the figures behind it, then what to be careful about."""
    metric, target = result["metric"]["name"], result["target"]
    lines = [result["headline"], ""]
    if target["value"] is not None:
        lines.append(f"Target: {metric} {target['value']:.4g} ({target['origin']}), smoothed, and kept.")
    columns = f"{'seeds to target':>16}{'mean to target':>15}{'whole run':>11}{f'final {metric}':>16}{'backward':>12}"
    lines.append(f"{'arm':18}{columns}")
    for name, arm in result["arms"].items():
        lines.append(_arm_line(name, arm["trials"], arm.get("average")))
    lines.append("Seeds to target: single runs that reached it. Mean to target: when the mean over all seeds did.")
    for comparison in result["comparisons"]:
        lines += ["", f"{comparison['arm']} against {comparison['baseline']}: {comparison['verdict']}"]
        if comparison["sentence"] not in result["headline"]:
            lines.append(f"  {comparison['sentence']}")
        lines += [
            _quantity_line(label, found, form, zero, key in BOUNDS)
            for key, label, form, zero in (
                ("speedup", "times as fast to the target", ".3f", "never"),
                ("compute", "times less compute to the target", ".3f", "never"),
                ("at_least", "times as fast to the target, at least", ".3f", "never"),
                ("compute_at_least", "times less compute to the target, at least", ".3f", "never"),
                ("final_quality", f"{metric} at the end, better by", "+.4f", None),
                ("equal_time", f"{metric} after equal time, better by", "+.4f", None),
                ("equal_steps", f"{metric} after equal steps, better by", "+.4f", None),
            )
            if (found := comparison.get(key)) is not None  # old versions knew no bounds
        ]
    lines += ["", *(f"Note: {warning}" for warning in result["warnings"])]
    return "\n".join([*lines, f"Everything is in {folder}."])


def _arm_line(name: str, trials: list[dict[str, Any]], average: dict[str, float] | None) -> str:
    reached = sum(trial["reached"] is not None for trial in trials)
    there = f"{average['seconds']:.1f} s" if average else "-"
    finals = [trial["final"] for trial in trials if trial["final"] is not None]
    return (
        f"{name:18}{f'{reached} of {len(trials)}':>16}{there:>15}"
        f"{_mean([trial['training_seconds'] for trial in trials], '.1f', ' s'):>11}{_mean(finals, '.4f'):>16}"
        f"{_mean([trial['backward_samples'] for trial in trials], ',.0f'):>12}"
    )


def _mean(values: list[float], form: str, unit: str = "") -> str:
    return f"{fmean(values):{form}}{unit}" if values else "-"


def _quantity_line(label: str, found: dict[str, Any], form: str, zero: str | None, bound: bool) -> str:
    """A figure with its interval; `zero` is what a limit of 0 means: a ratio of 0 is a target that is never reached.

    A lower bound is rounded down, and so is the lower limit of its interval.
    """
    mean, low, high = (None if found[key] is None else found[key] + 0.0 for key in ("mean", "low", "high"))  # no -0
    if bound:
        mean, low = (None if value is None else rounded_down(value, 3) for value in (mean, low))
    ends = [zero if zero and limit == 0 else f"{limit:{form}}" for limit in (low, high) if limit is not None]
    limits = f"   95% interval {' to '.join(ends)}" if ends else ""
    return f"  {label:43}{mean:{form}}{limits}"
