"""Snapshots of a run's memory, one for each step, and the files in which they are kept: CSV and JSON lines."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hybridtrainer import disk
from hybridtrainer.errors import RunFolderError


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Memory after one step; None where it cannot be told, never 0 for that.

    Attributes:
        step: The clock.
        phase: The phase of the step.
        seconds: Since the profiler was started.
        used_bytes: What tensors take on the GPU now; on a CPU the resident memory of the process.
        peak_bytes: The most they took in the course of the step; on a CPU before the update or after it.
        reserved_bytes: The most that torch had taken from the GPU in the course of the step.
        card_bytes: In use on the whole card, by every process.
        host_bytes: Resident memory of the process.
        weights_bytes: Of the peak, parameters and buffers.
        states_bytes: Of the peak, the optimizer's.
        gradients_bytes: Of the peak, gradients.
        other_bytes: The rest of the peak: activations and workspace, on a CPU the program itself too.
    """

    step: int
    phase: str
    seconds: float
    used_bytes: int | None
    peak_bytes: int | None
    reserved_bytes: int | None
    card_bytes: int | None
    host_bytes: int | None
    weights_bytes: int | None
    states_bytes: int | None
    gradients_bytes: int | None
    other_bytes: int | None


FLUSH_SECONDS = 5.0
COLUMNS = tuple(field.name for field in fields(Snapshot))
COMPONENTS = {
    "weights_bytes": "weights",
    "states_bytes": "optimizer states",
    "gradients_bytes": "gradients",
    "other_bytes": "activations and other",
}
"""Columns that together are the peak, and what they are."""


class SnapshotFile:
    """A CSV file to which snapshots are appended, so that a run that is killed leaves all but the last seconds of them.

    Args:
        path: The file.
        kept_bytes: Of a file that is there, what to keep; None writes it anew.
        clock: Seconds; where steps are short, a write for each would cost as much as all the rest of profiling.

    Raises:
        RunFolderError: if it cannot be written.
    """

    def __init__(self, path: Path, kept_bytes: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._waiting: list[str] = []
        self._written_at = clock()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            size = os.fstat(self._file).st_size
            os.ftruncate(self._file, min(kept_bytes or 0, size))
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            raise self._refused(error) from error
        if not self.size():
            self._waiting.append(_csv_line(COLUMNS))
            self.flush()

    def append(self, snapshot: Snapshot) -> None:
        """Takes a snapshot; it is in the file some seconds later, or after `flush`."""
        self._waiting.append(_csv_line(_cells(snapshot)))
        if self._clock() - self._written_at >= FLUSH_SECONDS:
            self.flush()

    def size(self) -> int:
        """Bytes of the file with everything that was appended."""
        self.flush()
        return os.fstat(self._file).st_size

    def close(self) -> None:
        """Writes what is left and closes the file."""
        try:
            self.flush()
        finally:
            os.close(self._file)

    def flush(self) -> None:
        """Writes everything that was appended."""
        line = "".join(self._waiting).encode()
        self._waiting, self._written_at = [], self._clock()
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> RunFolderError:
        return RunFolderError(f"{self._path} cannot be written: {error.strerror}.", "Free some space, or name another.")


def write_snapshots(path: Path, snapshots: Iterable[Snapshot]) -> None:
    """Writes snapshots as CSV or as JSON lines, as the name of the file says.

    Raises:
        RunFolderError: if the name ends otherwise, or the file cannot be written.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise RunFolderError(f"{path} is neither a CSV file nor one of JSON lines.", "End its name in .csv or .jsonl.")
    if path.suffix == ".csv":
        lines = [_csv_line(COLUMNS), *(_csv_line(_cells(snapshot)) for snapshot in snapshots)]
    else:
        lines = [json.dumps(asdict(snapshot)) + "\n" for snapshot in snapshots]
    try:
        disk.replace_file(path, "".join(lines))
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from error


def read_snapshots(path: Path) -> list[Snapshot]:
    """The snapshots in a CSV file; a last line that a crash has torn is left out.

    Raises:
        RunFolderError: if it cannot be read, or is none of ours.
    """
    try:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        rows = csv.DictReader(io.StringIO(whole))
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise ValueError("it has other columns")
        return [_snapshot(row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        raise RunFolderError(f"{path} is no profile that can be read: {error}.", "Restore it from a copy.") from error


def _cells(snapshot: Snapshot) -> list[object]:
    return [getattr(snapshot, name) for name in COLUMNS]


def _csv_line(cells: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _snapshot(row: dict[str, str]) -> Snapshot:
    figures = {name: int(row[name]) if row[name] else None for name in COLUMNS[3:]}
    return Snapshot(int(row["step"]), row["phase"], float(row["seconds"]), **figures)
