"""Whose speeds a plan is made with: those asked for, or those of the GPU at hand, measured before given."""

from __future__ import annotations

from pathlib import Path

from hybridtrainer.config_problems import closest
from hybridtrainer.errors import ModelError
from hybridtrainer.planning.calibration import calibration_path, read_calibration
from hybridtrainer.planning.cards import BUILT_IN
from hybridtrainer.planning.hardware import Hardware


def speeds_for(asked: str, gpu: str | None = None) -> Hardware:
    """Speeds by name or from a file.

    Args:
        asked: A card that is built in, such as "rtx-4070"; a GPU that was measured, by the name torch has for it; or
            a file that `hybridtrainer doctor --calibrate` has written, here or on another machine.
        gpu: The one at hand, where there is one: it is taken of a file that has several.

    Raises:
        ModelError: for a name that is not known, and a file that is no calibration.

    >>> speeds_for("RTX-4070").name
    'NVIDIA GeForce RTX 4070'
    """
    if asked.lower() in BUILT_IN:
        return BUILT_IN[asked.lower()]
    path = Path(asked)
    if path.is_file():
        return _from_file(path, gpu)
    kept = calibration_path()
    measured = read_calibration(kept) if kept.is_file() else {}
    by_name = {name.lower(): name for name in measured}
    if asked.lower() in by_name:
        name = by_name[asked.lower()]
        return measured[name].hardware(name)
    for card in BUILT_IN.values():
        if card.name.lower() == asked.lower():
            return card
    also = f" Measured here: {', '.join(measured)}." if measured else ""
    also += " Measure your own with `hybridtrainer doctor --calibrate`." if gpu is not None else ""
    meant = closest(asked.lower(), [*BUILT_IN, *measured])
    raise ModelError(
        f"The speeds of {asked!r} are not known, and there is no such file.",
        f"{meant + ' ' if meant else ''}Known are: {', '.join(BUILT_IN)}.{also}",
    )


def speeds_at_hand(gpu: str | None) -> Hardware | None:
    """Speeds of the GPU with this name: measured, else given, else none. Without a GPU there are none.

    Raises:
        ModelError: if the user's file of measurements is damaged.
    """
    kept = calibration_path()
    measured = read_calibration(kept) if kept.is_file() else {}
    if gpu is not None and gpu in measured:
        return measured[gpu].hardware(gpu)
    return next((each for each in BUILT_IN.values() if each.name == gpu), None)


def _from_file(path: Path, gpu: str | None) -> Hardware:
    measured = read_calibration(path)
    if gpu is not None and gpu in measured:
        return measured[gpu].hardware(gpu)
    if len(measured) > 1:
        raise ModelError(
            f"{path} has the speeds of several GPUs: {', '.join(measured)}.",
            "Name one: --hardware with its name, and the file in the variable HYBRIDTRAINER_CALIBRATION.",
        )
    name, values = next(iter(measured.items()))
    return values.hardware(name)
