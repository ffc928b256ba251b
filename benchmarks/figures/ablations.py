"""What jumps are worth part by part, as rows of a table."""

from __future__ import annotations

from typing import Any

from benchmarks.ablations import ARMS
from benchmarks.record import result

CREDITED = {
    "stdlib-gpt": "nano on the standard library",
    "stdlib-gpt-low": "the same",
    "fashion-mnist-small": "Fashion-MNIST, 16-32-32",
    "digits": "digits",
}
FILES = {"digits": "ablations_digits", "fashion-mnist-small": "ablations_fashion"}


def arms_of(task: str) -> dict[str, dict[str, Any]]:
    """What came of each arm of a task."""
    found: dict[str, dict[str, Any]] = result(FILES[task])["tasks"][task]["arms"]
    return found


def ablation_rows() -> list[str]:
    """Of each arm the loss over plain's at equal clock, lowest and highest seed in brackets, and what was spared."""
    return [f"| {arm} | {' | '.join(_cells(arms_of(task).get(arm)) for task in FILES)} |" for arm in list(ARMS)[1:]]


def window_errors() -> list[str]:
    """Squared error of learned forecasts of the next window, in squared lengths of it, by task."""
    return [f"{arms_of(task)['learned']['window_error']:.2f}" for task in FILES]


def _cells(arm: dict[str, float] | None) -> str:
    if arm is None:
        return "| "
    spared = 1 - arm["backward_passes"]
    return f"{arm['loss']:.2f} ({arm['lowest']:.2f} to {arm['highest']:.2f}) | {f'{spared:.1%}' if spared else ''}"


def credit_rows() -> list[str]:
    """What jumps are worth and are credited with; no worth where the held-out loss of plain training rises."""
    rows = []
    for name, told in result("credit")["tasks"].items():
        worth = f"{told['worth']:.1f}" if told["worth"] > 0 else ""
        lasting = f"{told['lasting']:.2f} | {told['confidence']:.2f}"
        rows.append(f"| {CREDITED[name]}, {told['rate']:g} | {worth} | {told['credit']:.1f} | {lasting} |")
    return rows
