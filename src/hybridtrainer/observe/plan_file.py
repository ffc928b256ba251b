"""The plan of a run as a small file in its folder, so that whoever resumes the run or reports on it knows it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from hybridtrainer import disk
from hybridtrainer.errors import RunFolderError
from hybridtrainer.records import Planned

PLAN = "plan.json"
MOST = 1 << 60  # bytes, or seconds: whoever writes more has written nonsense


def write_planned(folder: Path, planned: Planned) -> None:
    """Writes the plan, whole or not at all, and nowhere but into the folder: a link that is there is replaced.

    Raises:
        RunFolderError: if it cannot be written.
    """
    draft = folder / f".{PLAN}.draft"
    try:
        draft.unlink(missing_ok=True)  # one that a crash left
        disk.write_durably(draft, [(json.dumps(asdict(planned), indent=2) + "\n").encode()])
        disk.rename_durably(draft, folder / PLAN)
    except OSError as error:
        raise RunFolderError(f"{folder / PLAN} cannot be written: {error.strerror}.", "Free some space.") from error


def read_planned(folder: Path) -> Planned | None:
    """The plan that a run's folder keeps; None where there is none, or one that cannot be read."""
    try:
        content = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return _checked(Planned(**content))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _checked(planned: Planned) -> Planned:
    """Raises `TypeError` where a figure is none; whoever edits the file must not end a run with it."""
    sizes = (planned.gpu_bytes or 0, planned.host_bytes, planned.jump_host_bytes, planned.seconds or 0.0)
    words = (planned.text, planned.why_no_seconds, planned.speeds)
    are_sizes = all(isinstance(each, int | float) and 0 <= each < MOST for each in sizes)
    if not are_sizes or not all(isinstance(each, str) for each in words):
        raise TypeError("no figure")
    return planned
