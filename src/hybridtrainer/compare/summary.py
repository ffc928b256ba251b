"""The result of a comparison as a page of text."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any


def summary(result: dict[str, Any], folder: Path) -> str:
    """Verdict first, then the figures behind it, then what to be careful about."""
    metric, target = result["metric"]["name"], result["target"]
    lines = [result["headline"], ""]
    if target["value"] is not None:
        lines.append(f"Target: {metric} {target['value']:.4g} ({target['origin']}), smoothed, and kept.")
    lines.append(f"{'arm':18}{'reached':>9}{'to target':>11}{'whole run':>11}{f'final {metric}':>16}{'backward':>12}")
    for name, arm in result["arms"].items():
        lines.append(_arm_line(name, arm["trials"]))
    for comparison in result["comparisons"]:
        lines += ["", f"{comparison['arm']} against {comparison['baseline']}: {comparison['verdict']}"]
        lines += [
            _quantity_line(label, comparison[key], form)
            for key, label, form in (
                ("speedup", "times as fast to the target", ".3f"),
                ("compute", "times less compute to the target", ".3f"),
                ("final_quality", f"{metric} at the end, better by", "+.4f"),
                ("equal_time", f"{metric} after equal time, better by", "+.4f"),
                ("equal_steps", f"{metric} after equal steps, better by", "+.4f"),
            )
            if comparison[key] is not None
        ]
    lines += ["", *(f"Note: {warning}" for warning in result["warnings"])]
    return "\n".join([*lines, f"Everything is in {folder}."])


def _arm_line(name: str, trials: list[dict[str, Any]]) -> str:
    times = [trial["reached"]["seconds"] for trial in trials if trial["reached"]]
    finals = [trial["final"] for trial in trials if trial["final"] is not None]
    return (
        f"{name:18}{f'{len(times)} of {len(trials)}':>9}{_mean(times, '.1f', ' s'):>11}"
        f"{_mean([trial['training_seconds'] for trial in trials], '.1f', ' s'):>11}{_mean(finals, '.4f'):>16}"
        f"{_mean([trial['backward_samples'] for trial in trials], ',.0f'):>12}"
    )


def _mean(values: list[float], form: str, unit: str = "") -> str:
    return f"{fmean(values):{form}}{unit}" if values else "-"


def _quantity_line(label: str, found: dict[str, Any], form: str) -> str:
    limits = "" if found["low"] is None else f"   95% interval {found['low']:{form}} to {found['high']:{form}}"
    return f"  {label:40}{found['mean']:{form}}{limits}"
