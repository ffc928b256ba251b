"""Writing so that a crash loses nothing that was published: every file and folder is synced before it counts.

This module knows nothing of checkpoints. All calls that change the disk go through `os`, one system call each,
so that a test can enumerate them and fail or kill at every one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

Bytes = bytes | memoryview

STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd", "/proc")  # lead to what the process has open


def write_durably(path: Path, pieces: Iterable[Bytes]) -> tuple[int, str]:
    """Creates a file, writes the pieces, syncs it. Returns its size in bytes and its SHA-256.

    Raises:
        FileExistsError: if there is one already; nothing is ever overwritten.
    """
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            _write_all(descriptor, piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()


def make_folder(path: Path) -> None:
    """Creates one folder and syncs the entry in its parent."""
    os.mkdir(path)  # noqa: PTH102
    sync_folder(path.parent)


def rename_durably(source: Path, target: Path) -> None:
    """Renames within one folder and syncs that folder, so that the new name survives a power loss."""
    os.rename(source, target)  # noqa: PTH104
    sync_folder(target.parent)


def replace_file(path: Path, text: str) -> None:
    """Writes a text file whole or not at all; one that is there is replaced only by all of the new one.

    What is no plain file of a folder's, such as a pipe or /dev/stdout, is written to as it is; so is a file in a folder
    where nothing can be added.

    Raises:
        OSError: if it cannot be written. One that is there is as it was.
    """
    mode = path.stat().st_mode if path.exists() else None
    if any(path.is_relative_to(stream) for stream in STREAMS) or (mode is not None and not stat.S_ISREG(mode)):
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        return
    path = Path(os.path.realpath(path))  # a link stays one
    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if mode is not None and not os.access(path.parent, os.W_OK):
        path.write_text(text, encoding="utf-8")
        return
    draft = path.with_name(f".{path.name[:200]}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)  # one that a crash left
    try:
        write_durably(draft, [text.encode()])
        if mode is not None:
            draft.chmod(stat.S_IMODE(mode))
        rename_durably(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_small(path: Path, limit_bytes: int = 16 << 20) -> str:
    """The text of a file that somebody wrote; one that is far too large for that is not read to its end.

    Raises:
        OSError: if it cannot be read, or is larger than the limit.
        UnicodeDecodeError: if it is not UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return content.decode("utf-8")


def sync_folder(path: Path) -> None:
    """Makes the entries of a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Deletes a folder of plain files; a missing one is fine."""
    if not path.is_dir() or path.is_symlink():
        return
    for entry in path.iterdir():
        os.unlink(entry)  # noqa: PTH108
    os.rmdir(path)  # noqa: PTH106
    sync_folder(path.parent)


def file_digest(path: Path, chunk_bytes: int = 1 << 24) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(chunk_bytes):
            digest.update(piece)
    return digest.hexdigest()


def _write_all(descriptor: int, piece: Bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]
