"""Where results are kept: one JSON file each, with date, hardware, versions and the command that made it."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from hybridtrainer.observe.environment import environment

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, content: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes `content` under `name`, with everything needed to make it again."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    made = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command(),
        "environment": environment(),
    }
    path.write_text(json.dumps(made | content, indent=2) + "\n")
    return path


@cache
def result(name: str) -> dict[str, Any]:
    """A result file by name."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def gib(nbytes: float) -> float:
    """Bytes in GiB."""
    return nbytes / (1 << 30)


def command() -> str:
    """What was typed, without the folder of the result: that is not part of how it was made."""
    script, *arguments = sys.argv
    if "--out" in arguments:
        at = arguments.index("--out")
        del arguments[at : at + 2]
    parts = Path(script).resolve().with_suffix("").relative_to(Path(__file__).parents[1]).parts
    module = ".".join(part for part in parts if part != "__main__")
    return shlex.join(["python", "-m", module, *arguments])
