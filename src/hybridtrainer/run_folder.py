"""The folder of one run: named safely, locked while a process trains in it, never written outside of.

runs/my-run/
    config.toml        the resolved configuration
    environment.json   versions and hardware
    plan.json          what it was planned to take, where it was planned
    log.jsonl          one record per step, jump, phase change, evaluation
    checkpoints/       see checkpoint.py
    lock               held by the process that trains here
"""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hybridtrainer import disk, ranks
from hybridtrainer.checkpoint import CheckpointStore
from hybridtrainer.config import RUN_NAME_RULE, is_run_name
from hybridtrainer.errors import LockedError, RunFolderError


def run_path(folder: str | Path, name: str) -> Path:
    """The folder of the run `name` inside `folder`.

    Raises:
        RunFolderError: for a name that could lead anywhere else.
    """
    if not is_run_name(name):
        raise RunFolderError(f"{name[:60]!r} cannot be the name of a run.", RUN_NAME_RULE)
    return Path(folder) / name


def was_made_by_command(folder: Path) -> bool:
    """Whether a run's folder says what is trained on what, so that the command line can go on with it.

    One that was made from Python has the trainer's settings alone.
    """
    try:
        return "train" in tomllib.loads((folder / "config.toml").read_text())
    except (OSError, ValueError):
        return False


class RunFolder:
    """A run's folder, locked for this process until it is closed.

    Args:
        path: The folder; made if it is not there.
        keep_last: How many checkpoints to keep.
        resume: Whether to go on with the run that is there. Without it a folder that has a run is refused.

    Raises:
        LockedError: if another live process trains there. Nothing has been written then.
        RunFolderError: if it cannot be written, or holds a run already.
    """

    def __init__(self, path: str | Path, keep_last: int, resume: bool = False) -> None:
        self.path = Path(path)
        if "\0" in str(path):
            raise RunFolderError("The path of the run folder has a NUL character in it.", "Take it out.")
        self.log_path = self.path / "log.jsonl"
        self.checkpoints = CheckpointStore(self.path / "checkpoints", keep_last)
        self._lock = -1
        ranks.on_first("run folder", lambda: self._open(resume))

    def _open(self, resume: bool) -> None:
        """Locks the folder; the first rank of a distributed run does so for all."""
        self._refuse_links()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            raise RunFolderError(
                f"The run folder {self.path} cannot be written: {error.strerror}.", "Choose another folder."
            ) from error
        if not resume and (self.log_path.exists() or self.checkpoints.folders()):
            self.close()
            by_command = was_made_by_command(self.path)
            way = f"with `hybridtrainer resume {self.path}`" if by_command else "from its own program, with resume=True"
            raise RunFolderError(
                f"{self.path} already holds a run.", f"Continue it {way}, or choose another name (`--run NAME`)."
            )
        self.checkpoints.sweep()

    def write_text(self, name: str, text: str) -> None:
        """Writes a small file of the run, whole or not at all; of several ranks the first does."""
        if not ranks.is_first():
            return
        draft = self.path / f".{name}.draft"
        try:
            draft.unlink(missing_ok=True)  # one that a crash left, or a link that leads elsewhere
            disk.write_durably(draft, [text.encode()])
            disk.rename_durably(draft, self.path / name)
        except OSError as error:
            raise RunFolderError(
                f"{self.path / name} cannot be written: {error.strerror}.", "Free some space."
            ) from error

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a small JSON file of the run."""
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def close(self) -> None:
        """Gives the folder free."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_lock(self) -> int:
        """The kernel drops the lock with the process that holds it, so a stale one cannot be."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise LockedError(
                f"Another process (pid {holder}) trains in {self.path}.",
                "Wait for it, stop it, or give this run another name.",
            ) from error
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor

    def _refuse_links(self) -> None:
        for path in (self.path, self.log_path, self.checkpoints.root, self.path / "lock"):
            if path.is_symlink():
                raise RunFolderError(
                    f"{path} is a symbolic link, and a run writes nowhere but into its own folder.",
                    "Replace the link by a real folder.",
                )


def open_run(path: str | Path, keep_last: int, resume: bool) -> RunFolder:
    """The folder of a run that begins, or goes on; says so where there is nothing to go on with.

    Raises:
        LockedError, RunFolderError: as `RunFolder` does.
    """
    folder = RunFolder(path, keep_last, resume)
    if resume and ranks.is_first() and not folder.log_path.exists() and not folder.checkpoints.folders():
        warnings.warn(f"There is no run in {folder.path} to go on with: a new one begins there.", stacklevel=3)
    return folder
