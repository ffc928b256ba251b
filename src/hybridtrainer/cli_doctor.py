"""`hybridtrainer doctor`: what this machine has, what will not work, and how fast it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hybridtrainer.cli_answer import AsJson, reported


def doctor(
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure link, memory and products of the GPU, for `plan` to use; half a minute."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has, and what will not work."""
    with reported(as_json) as answer:
        if calibrate:
            answer(*_calibrate(as_json))
            return
        from hybridtrainer.observe.environment import diagnose, environment

        checks = [*diagnose(Path.cwd()), _calibration()]
        text = "\n".join(f"{'ok' if well else '--':3} {name:14} {finding}" for name, well, finding in checks)
        answer({"environment": environment(), "checks": [list(check) for check in checks]}, text)


def _calibrate(as_json: bool) -> tuple[dict[str, Any], str]:
    """Measures the first GPU and keeps what was found."""
    from dataclasses import asdict

    import torch

    from hybridtrainer.bench.calibrate import calibrate, describe
    from hybridtrainer.planning.calibration import calibration_path, keep_calibration, read_calibration

    path = calibration_path()
    if path.exists():
        read_calibration(path)  # what is measured in half a minute must have a place
    found = calibrate(torch.device("cuda", 0), str if as_json else lambda line: typer.echo(line, err=True))
    name = torch.cuda.get_device_properties(0).name
    keep_calibration(path, name, found)
    content = {"gpu": name, "path": str(path), "measured": asdict(found)}
    return content, f"{describe(name, found)}\nKept in {path}: `hybridtrainer plan` uses it from now on."


def _calibration() -> tuple[str, bool, str]:
    """Whether the speeds of this machine's GPU are known, and the file of measurements is sound."""
    from hybridtrainer.errors import HybridTrainerError
    from hybridtrainer.planning.machine import gpu_at_hand
    from hybridtrainer.planning.speeds import speeds_at_hand

    gpu = gpu_at_hand()
    try:
        known = speeds_at_hand(None if gpu is None else gpu.name)
    except HybridTrainerError as error:
        return "speeds", False, str(error)
    if gpu is None:
        return "speeds", False, "none to measure without a GPU; `hybridtrainer plan --hardware rtx-4070` names a card"
    if known is None or not known.origin.startswith("measured"):
        origin = "not known" if known is None else known.origin
        return "speeds", False, f"{origin}; measure them with `hybridtrainer doctor --calibrate`"
    return "speeds", True, f"of {gpu.name}, {known.origin}"
