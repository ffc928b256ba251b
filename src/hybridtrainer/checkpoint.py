"""Checkpoints: one folder each, safetensors and JSON, complete or not there at all.

    000007-step-350/
        state.safetensors   every tensor
        state.json          everything else, referring to the tensors by name
        manifest.json       sizes and SHA-256 of both, then its own SHA-256 on the last line; written last

Further ranks of a distributed run add two files each, see `rank_files.py`; the first makes and publishes the folder.
A folder is written under a hidden name, synced, and renamed into place. Reading verifies every byte before the
first tensor is handed out; no pickle anywhere. This module does not know what the state means.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hybridtrainer import disk, ranks
from hybridtrainer.errors import CorruptCheckpointError, SaveError
from hybridtrainer.manifest import (
    FORMAT,
    KIND,
    MANIFEST,
    as_bytes,
    corrupt,
    damage,
    file_names,
    looks_whole,
    read_document,
    read_manifest,
)
from hybridtrainer.rank_files import FIRST, first_rows, in_manifest, name_of, own_part, state_of
from hybridtrainer.tensor_file import DOCUMENT_ENDING, TENSORS_ENDING, Written, write_tree
from hybridtrainer.tree import Json, Tree, unpack

TENSORS, DOCUMENT = f"{FIRST}{TENSORS_ENDING}", f"{FIRST}{DOCUMENT_ENDING}"

_FINISHED = re.compile(r"(\d{6,})-step-(\d+)")
_UNFINISHED = re.compile(r"\.(writing|deleting)-.+")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its manifest, and its state as a tree that loads tensor by tensor."""

    folder: Path
    manifest: Mapping[str, Any]
    document: Json

    @property
    def step(self) -> int:
        """The clock at which it was made."""
        return int(self.manifest["step"])

    def state(self, sharded: bool = False) -> Tree:
        """The whole state, every tensor in host memory.

        Args:
            sharded: Whether this process has a part of the weights only; then it may get that part.
        """
        return ranks.each("state of a checkpoint", lambda: self._state(sharded))

    def _state(self, sharded: bool) -> Tree:
        try:
            return state_of(self.manifest, self._read, sharded)
        except (SafetensorError, OSError, ValueError, TypeError, LookupError) as error:
            raise corrupt(self.folder, f"its state cannot be rebuilt ({error}).") from error

    def _read(self, name: str) -> Tree:
        document = self.document if name == FIRST else read_document(self.folder, f"{name}{DOCUMENT_ENDING}")
        with safe_open(self.folder / f"{name}{TENSORS_ENDING}", framework="pt") as file:
            return unpack(document, file.get_tensor)


def write_checkpoint(folder: Path, state: Tree, step: int, extra: Mapping[str, Any] | None = None) -> None:
    """Writes `state` as the checkpoint `folder`: afterwards it is there whole, or not at all.

    An existing checkpoint of that name is replaced; until the new one is in place the old one stays readable,
    under its name or with `.previous` behind it.

    Args:
        folder: Where it shall be. The parent must exist.
        state: A tree of plain values and tensors.
        step: The clock, kept in the manifest.
        extra: What may be lost without changing the future of the run, for example timings.

    Raises:
        SaveError: if the disk is full, read-only or failing, or something else has that name. What was there before is
            still there.
    """
    draft = folder.parent / ranks.on_first("draft of a checkpoint", lambda: _begin(folder))
    try:
        rows = first_rows(state)
        found = ranks.together("files of a checkpoint", lambda: _write_files(folder, draft, state, rows))
        files = {name: entry for each in found for name, entry in each.items()}
        ranks.on_first("manifest of a checkpoint", lambda: _finish(folder, draft, files, step, extra, state))
    except BaseException:
        if ranks.is_first():
            _discard(draft)
        raise


@contextmanager
def _saving(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"The checkpoint {folder} was not written: {error.strerror or error}. The one before it is untouched.",
            "Free some space or choose another folder; training can go on from memory.",
        ) from error


def _begin(folder: Path) -> str:
    """Makes an empty draft; returns its name."""
    for taken in (folder, _previous(folder)):
        _refuse_other_things(taken)
    draft = folder.parent / f".writing-{folder.name}-{os.getpid()}"
    with _saving(folder):
        disk.remove_folder(draft)
        disk.make_folder(draft)
    return draft.name


def _write_files(folder: Path, draft: Path, state: Tree, rows: Mapping[int, int]) -> Written:
    """Writes what this rank has to say."""
    if not draft.is_dir():
        raise SaveError(
            f"Rank {ranks.rank()} does not find {draft}, which the first rank has made.",
            "Keep checkpoints in a folder that all ranks share.",
        )
    with _saving(folder):
        return write_tree(draft, name_of(ranks.rank()), own_part(state) if ranks.count() > 1 else state, rows)


def _finish(folder: Path, draft: Path, files: Written, step: int, extra: Mapping[str, Any] | None, state: Tree) -> None:
    """Writes the manifest and puts the checkpoint in its place."""
    manifest = {
        "kind": KIND,
        "format": FORMAT,
        "step": step,
        "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()},
        **in_manifest(state),
        "extra": dict(extra or {}),
    }
    with _saving(folder):
        disk.write_durably(draft / MANIFEST, [as_bytes(manifest)])
        disk.sync_folder(draft)
        _publish(draft, folder)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Opens a checkpoint and verifies every byte of it.

    Raises:
        CorruptCheckpointError: if anything is missing, damaged or not a checkpoint.
        ForeignCheckpointError: if it was made by another version of the format.
    """
    previous = _previous(folder)
    if not folder.exists() and previous.is_dir():
        folder = previous  # a crash between two renames: the old one is whole
    manifest = ranks.each("manifest of a checkpoint", lambda: read_manifest(folder))
    same = "Let all of them load one folder, on a disk that they share."
    ranks.require_same("the checkpoint to load", hashlib.sha256(as_bytes(manifest)).hexdigest(), same)
    # Ranks share the work, and what one of them finds damaged none of them uses.
    names = file_names(folder, manifest)
    found = [each for each in ranks.exchange("checkpoint", damage(folder, names, manifest)) if each]
    if found:
        raise corrupt(folder, found[0])
    return Checkpoint(folder, manifest, read_document(folder, DOCUMENT))


class CheckpointStore:
    """The checkpoints of one run: numbered in the order in which they were saved.

    The number, not the clock, decides which is newest: a roll-back turns the clock back.
    """

    def __init__(self, root: Path, keep_last: int) -> None:
        self.root = root
        self.keep_last = keep_last

    def save(self, state: Tree, step: int, extra: Mapping[str, Any] | None = None) -> Path:
        """Writes the next checkpoint, then deletes those beyond `keep_last`."""
        folder = self.root / ranks.on_first("name of a checkpoint", lambda: self._next_name(step))
        write_checkpoint(folder, state, step, extra)
        if ranks.is_first():
            self.prune()
        return folder

    def _next_name(self, step: int) -> str:
        number = 1 + max((_number(folder) for folder in self.folders()), default=0)
        try:
            if not self.root.is_dir():
                disk.make_folder(self.root)
        except OSError as error:
            raise SaveError(f"{self.root} cannot be made: {error.strerror}.", "Choose another run folder.") from error
        return f"{number:06d}-step-{step}"

    def folders(self) -> list[Path]:
        """All finished checkpoints, oldest first; drafts and foreign folders are not among them."""
        if not self.root.is_dir():
            return []
        found = [entry for entry in self.root.iterdir() if _FINISHED.fullmatch(entry.name) and entry.is_dir()]
        return sorted((entry for entry in found if not entry.is_symlink()), key=_number)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies; damaged ones are passed over."""
        for name in ranks.on_first("checkpoints", lambda: [folder.name for folder in reversed(self.folders())]):
            try:
                return read_checkpoint(self.root / name)
            except CorruptCheckpointError:
                continue
        return None

    def prune(self) -> None:
        """Deletes all but the newest `keep_last` that look whole, and never the last one that does."""
        whole = [folder for folder in self.folders() if looks_whole(folder)]
        for folder in whole[: -self.keep_last]:
            doomed = folder.with_name(f".deleting-{folder.name}")
            try:
                disk.rename_durably(folder, doomed)
                disk.remove_folder(doomed)
            except OSError:
                return  # keeping too many is harmless; the next save tries again

    def sweep(self) -> None:
        """Removes what an interrupted save or deletion left behind. Call it with the run folder locked."""
        if not self.root.is_dir():
            return
        for entry in self.root.iterdir():
            if _UNFINISHED.fullmatch(entry.name):
                _discard(entry)


def _previous(folder: Path) -> Path:
    return folder.with_name(folder.name + ".previous")


def _refuse_other_things(path: Path) -> None:
    """Only a checkpoint or an empty folder may be replaced."""
    is_ours = path.is_dir() and not path.is_symlink() and ((path / MANIFEST).is_file() or not any(path.iterdir()))
    if not is_ours and (path.exists() or path.is_symlink()):
        raise SaveError(f"{path} is there already and is no checkpoint.", "Choose another name, or move it away.")


def _publish(draft: Path, folder: Path) -> None:
    previous = _previous(folder)
    if folder.exists():
        disk.remove_folder(previous)
        disk.rename_durably(folder, previous)
    disk.rename_durably(draft, folder)
    disk.remove_folder(previous)


def _discard(folder: Path) -> None:
    try:
        disk.remove_folder(folder)
    except OSError:
        return  # the next start sweeps it


def _number(folder: Path) -> int:
    match = _FINISHED.fullmatch(folder.name)
    return int(match.group(1)) if match else 0
