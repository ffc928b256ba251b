"""Every system call with which a save changes the disk: counted, killed at, failed at, or written down.

The calls all go through `os`, so replacing them there enumerates them. `tests/test_strace.py` checks against
strace that none is missed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALLS = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir")

Interfere = Callable[[int, str, tuple[Any, ...]], None]


@contextmanager
def intercepted(before: Interfere, after: Interfere) -> Iterator[None]:
    """Calls `before` and `after` around every disk call, with its number, name and arguments."""
    originals = {name: getattr(os, name) for name in CALLS}
    count = 0

    def wrap(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            if name == "open" and not arguments[1] & os.O_CREAT:
                return originals[name](*arguments, **keywords)
            number, count = count, count + 1
            before(number, name, arguments)
            result = originals[name](*arguments, **keywords)
            after(number, name, (*arguments, result))
            return result

        return call

    try:
        for name in CALLS:
            setattr(os, name, wrap(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def nothing(number: int, name: str, arguments: tuple[Any, ...]) -> None:
    """Does not interfere."""


def count_calls(action: Callable[[], object]) -> list[str]:
    """The names of the disk calls that `action` makes, in order."""
    names: list[str] = []
    with intercepted(lambda number, name, arguments: names.append(name), nothing):
        action()
    return names


def killed_at(action: Callable[[], object], number: int, moment: str) -> bool:
    """Runs `action` in a forked process that kills itself "before", "after" or in the "middle" of a call.

    Returns whether it was killed; False means that it ended before.
    """
    write = os.write

    def strike(at: int, name: str, arguments: tuple[Any, ...]) -> None:
        if at != number:
            return
        if moment == "middle" and name == "write":
            write(arguments[0], bytes(arguments[1][: len(arguments[1]) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            with intercepted(nothing if moment == "after" else strike, strike if moment == "after" else nothing):
                action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@dataclass
class Disk:
    """What would be on the disk after a power loss.

    File contents count only as far as they were synced. Names count as far as their folder was synced, or, with
    `eager_names`, at once: file systems may write names before contents.
    """

    eager_names: bool
    contents: dict[int, bytearray] = field(default_factory=dict)  # by file number
    synced: dict[int, bytes] = field(default_factory=dict)
    names: dict[Path, int | None] = field(default_factory=dict)  # path to file number, None for a folder
    durable: dict[Path, int | None] = field(default_factory=dict)
    open_files: dict[int, tuple[int, Path]] = field(default_factory=dict)  # descriptor to file number and path

    def load(self, root: Path) -> None:
        """Starts from what is really there, all of it durable."""
        for path in sorted(root.rglob("*")):
            if path.is_dir():
                self.names[path] = None
            else:
                number = self._new_file()
                self.contents[number] = bytearray(path.read_bytes())
                self.synced[number] = path.read_bytes()
                self.names[path] = number
        self.durable = dict(self.names)

    def apply(self, name: str, arguments: tuple[Any, ...]) -> None:
        """One completed call; the last argument is its result."""
        match name:
            case "open":
                number = self._new_file()
                self.names[Path(arguments[0])] = number
                self.open_files[arguments[-1]] = (number, Path(arguments[0]))
            case "write":
                number, _ = self.open_files[arguments[0]]
                self.contents[number] += bytes(arguments[1][: arguments[-1]])
            case "fsync" if arguments[0] in self.open_files:
                number, _ = self.open_files[arguments[0]]
                self.synced[number] = bytes(self.contents[number])
            case "fsync":
                self._sync_folder(Path(f"/proc/self/fd/{arguments[0]}").readlink())
            case "close":
                self.open_files.pop(arguments[0], None)
            case "mkdir":
                self.names[Path(arguments[0])] = None
            case "rename":
                self._rename(self.names, Path(arguments[0]), Path(arguments[1]))
            case "unlink" | "rmdir":
                del self.names[Path(arguments[0])]
        if self.eager_names:
            self.durable = dict(self.names)

    def image(self) -> dict[Path, bytes | None]:
        """What survives: files with their contents, folders with None."""
        return {p: None if n is None else self.synced.get(n, b"") for p, n in sorted(self.durable.items())}

    def _sync_folder(self, folder: Path) -> None:
        moved = [path for path in self.durable if path.parent == folder and path not in self.names]
        for path in moved:
            for gone in [p for p in self.durable if p == path or path in p.parents]:
                del self.durable[gone]
        for path, number in self.names.items():
            if path.parent == folder and path not in self.durable:
                self.durable[path] = number
                # A folder that gets its name brings along what was durable in it under its former name.
                if number is None:
                    self.durable |= {p: n for p, n in self.names.items() if path in p.parents and self._was_synced(n)}

    def _was_synced(self, number: int | None) -> bool:
        return number is None or number in self.synced

    def _rename(self, names: dict[Path, int | None], source: Path, target: Path) -> None:
        for path in [p for p in names if p == source or source in p.parents]:
            names[target / path.relative_to(source)] = names.pop(path)

    def _new_file(self) -> int:
        number = len(self.contents)
        self.contents[number] = bytearray()
        return number


def write_image(image: dict[Path, bytes | None], root: Path, target: Path) -> None:
    """Writes what survived below `root` into the new folder `target`."""
    target.mkdir()
    for path, content in image.items():
        place = target / path.relative_to(root)
        if content is None:
            place.mkdir(exist_ok=True)
        elif place.parent.is_dir():  # or its folder did not survive
            place.write_bytes(content)
