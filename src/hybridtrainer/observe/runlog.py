"""The run log: one JSON record a line, appended as things happen, readable after any crash.

Records of a run that was resumed from a checkpoint stay in the file; `read_log` leaves out those that the resumed
run made again, and a last line that a crash has torn.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from hybridtrainer.errors import RunFolderError
from hybridtrainer.records import (
    Event,
    JumpRecord,
    LossForecast,
    MemoryUse,
    Notice,
    PhaseChange,
    PlanResult,
    PrecisionChange,
    StepResult,
)

VERSION = 1
KINDS: dict[type, str] = {
    StepResult: "step",
    JumpRecord: "jump",
    PhaseChange: "phase",
    PrecisionChange: "precision",
    LossForecast: "forecast",
    MemoryUse: "memory",
    Notice: "notice",
    PlanResult: "plan",
}


class Follower(Protocol):
    """Is shown every record once it is in the log."""

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A record has been written, with these fields."""


class RunLog:
    """Appends records to a log file.

    Args:
        path: The file; made if it is not there.
        continues_at: For a resumed run, the size of the file when its checkpoint was made.

    Attributes:
        followers: Shown every record that is written.
    """

    def __init__(self, path: Path, continues_at: int | None = None) -> None:
        self.followers: list[Follower] = []
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(path, flags, 0o644)
        except OSError as error:
            raise RunFolderError(
                f"The log {path} cannot be written: {error.strerror}.", "Choose another folder."
            ) from error
        self._cut_torn_line()
        if continues_at is not None:
            self.write("resume", continues_at=continues_at)

    def record(self, record: Event) -> None:
        """Writes a record of the run."""
        self.write(KINDS[type(record)], **asdict(record))

    def write(self, kind: str, **fields: Any) -> None:
        """Writes one line. It is in the file when this returns; it is on the disk after `sync`."""
        clean = {name: _finite(value) for name, value in fields.items()}
        line = (json.dumps({"v": VERSION, "kind": kind, **clean}) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            raise RunFolderError(f"The log cannot be written: {error.strerror}.", "Free some space.") from error
        for follower in self.followers:
            follower.write(kind, clean)

    def sync(self) -> None:
        """Makes everything written so far survive a power loss."""
        os.fsync(self._file)

    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self._file).st_size

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cut_torn_line(self) -> None:
        size = end = self.size()
        while end:
            start = max(0, end - (1 << 20))
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a run, in order, as if it had never been interrupted.

    Raises:
        RunFolderError: if there is no log, or it is not one of ours.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"There is no log {path}: {error.strerror}.", "Name the folder of a run.") from error
    records: list[tuple[int, dict[str, Any]]] = []
    offset = 0
    for line in raw.splitlines(keepends=True):
        start, offset = offset, offset + len(line)
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            kind, version = record["kind"], record["v"]
            continues_at = int(record["continues_at"]) if kind == "resume" else offset
        except (ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{path} has a damaged line at byte {start}.", "Restore it from a copy.") from error
        if version != VERSION:
            raise RunFolderError(
                f"{path} has version {version}; this program reads {VERSION}.", "Use the other version."
            )
        if kind == "resume":
            records = [(at, known) for at, known in records if at < continues_at]
        records.append((start, record))
    return [record for _, record in records]


def last_evaluation(path: Path | None) -> int | None:
    """The step of the newest evaluation in a log, which a resumed run need not make again; None if there is none."""
    try:
        records = [] if path is None else read_log(path)
    except RunFolderError:  # whatever is wrong with the log, the run can go on
        return None
    return next((int(record["step"]) for record in reversed(records) if record["kind"] == "evaluation"), None)


def _finite(value: Any) -> Any:
    """JSON has no NaN; a value that is not finite is written as its name."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
