"""Speeds of this machine's GPUs, measured once and kept in a file of the user's.

    {"format": "hybridtrainer-calibration", "version": 1, "gpus": {"NVIDIA H200": {"flops": ..., "memory": ..., ...}}}

What is kept is what was measured: large products, plain kernels. A training step reaches a share of it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridtrainer import disk
from hybridtrainer.errors import HybridTrainerError, ModelError
from hybridtrainer.planning.hardware import Hardware

FORMAT, VERSION = "hybridtrainer-calibration", 1
VARIABLE = "HYBRIDTRAINER_CALIBRATION"
# What a step reaches of a large product's speed and of a plain kernel's: the H200's 710 TFLOP/s and 1.91 TB/s, which
# are fitted to whole steps, over the 796 TFLOP/s and 4.29 TB/s that were measured there.
PRODUCT_SHARE, MEMORY_SHARE = 0.89, 0.44
LARGEST = 1e18


@dataclass(frozen=True)
class Measured:
    """What was measured on one GPU.

    Attributes:
        flops: Of a large product in 16 bits, operations in a second.
        memory: Bytes in a second that a plain kernel reads and writes.
        inward: Bytes in a second from host memory to the GPU.
        outward: The other way.
        both: Both ways at once, together.
        launch: Seconds of the host for each kernel of a small training step.
        context_bytes: GPU memory that CUDA itself takes.
        vram_bytes: The card's memory.
        date: When.
    """

    flops: float
    memory: float
    inward: float
    outward: float
    both: float
    launch: float
    context_bytes: int
    vram_bytes: int
    date: str

    def hardware(self, name: str) -> Hardware:
        """As a plan takes it."""
        return Hardware(
            name,
            PRODUCT_SHARE * self.flops,
            MEMORY_SHARE * self.memory,
            self.inward,
            self.outward,
            self.both,
            self.context_bytes,
            self.launch,
            f"measured on {self.date}",
            self.vram_bytes,
        )


def calibration_path() -> Path:
    """Where measurements are kept: $HYBRIDTRAINER_CALIBRATION, or calibration.json in the user's configuration."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "hybridtrainer" / "calibration.json"


def read_calibration(path: Path) -> dict[str, Measured]:
    """What a file holds, by the GPU's name.

    Raises:
        ModelError: if it cannot be read, is damaged, or is none of ours.
    """
    remedy = "A damaged file may be removed; where there is a GPU, `hybridtrainer doctor --calibrate` makes a new one."
    try:
        content = json.loads(disk.read_small(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.", remedy) from error
    except (ValueError, RecursionError) as error:  # also what is no UTF-8
        raise ModelError(f"{path} is no calibration: it holds no JSON.", remedy) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ModelError(f'{path} is no calibration: its "format" is not "{FORMAT}".', remedy)
    if content.get("version") != VERSION:
        raise ModelError(f"{path} has version {content.get('version')!r}; this program reads {VERSION}.", remedy)
    gpus = content.get("gpus")
    if not isinstance(gpus, dict) or not gpus:
        raise ModelError(f"{path} holds the speeds of no GPU.", remedy)
    return {name: _measured(path, name, values, remedy) for name, values in gpus.items()}


def keep_calibration(path: Path, name: str, measured: Measured) -> None:
    """Adds the figures of one GPU to a file, or replaces them there; the file is whole at any time.

    Raises:
        HybridTrainerError: if it cannot be written.
        ModelError: if what is there is no calibration.
    """
    known = read_calibration(path) if path.exists() else {}
    gpus = {each: asdict(values) for each, values in (known | {name: measured}).items()}
    text = json.dumps({"format": FORMAT, "version": VERSION, "gpus": gpus}, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.replace_file(path, text)
    except OSError as error:
        raise HybridTrainerError(
            f"{path} cannot be written: {error.strerror}.", f"Name another file in the variable {VARIABLE}."
        ) from error


def _measured(path: Path, name: str, values: Any, remedy: str) -> Measured:
    fields = Measured.__dataclass_fields__
    if not isinstance(values, Mapping) or set(values) != set(fields):
        raise ModelError(f"{path} does not have the figures of {name}: {', '.join(fields)}.", remedy)
    wrong = [key for key, value in values.items() if key != "date" and not _is_figure(value)]
    if wrong:
        raise ModelError(f"{path} has no sensible {wrong[0]} of {name}: {values[wrong[0]]!r}.", remedy)
    figures: dict[str, Any] = {key: int(value) if key.endswith("_bytes") else value for key, value in values.items()}
    return Measured(**figures | {"date": str(values["date"])})


def _is_figure(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 < value < LARGEST
    )
