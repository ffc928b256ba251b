"""Checkpoints: one folder each, safetensors and JSON, complete or not there at all.

    000007-step-350/
        state.safetensors   every tensor
        state.json          everything else, referring to the tensors by name
        manifest.json       sizes and SHA-256 of both, then its own SHA-256 on the last line; written last

A folder is written under a hidden name, synced, and renamed into place. Reading verifies every byte before the
first tensor is handed out; no pickle anywhere. This module does not know what the state means.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridtrainer import disk
from hybridtrainer.errors import CorruptCheckpointError, ForeignCheckpointError, ModelError, SaveError
from hybridtrainer.tree import Json, Tree, pack, tensor_bytes, unpack

FORMAT = 1
TENSORS, DOCUMENT, MANIFEST = "state.safetensors", "state.json", "manifest.json"
MAX_DOCUMENT_BYTES = 64 << 20
MAX_MANIFEST_BYTES = 1 << 20

_FINISHED = re.compile(r"(\d{6,})-step-(\d+)")
_UNFINISHED = re.compile(r"\.(writing|deleting)-.+")
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
}  # fmt: skip


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

    def state(self) -> Tree:
        """The whole state, every tensor in host memory."""
        try:
            with safe_open(self.folder / TENSORS, framework="pt") as file:
                return unpack(self.document, file.get_tensor)
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise _corrupt(self.folder, f"its state cannot be rebuilt ({error}).") from error


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
    for taken in (folder, _previous(folder)):
        _refuse_other_things(taken)
    tensors, document = pack(state)
    draft = folder.parent / f".writing-{folder.name}-{os.getpid()}"
    try:
        disk.remove_folder(draft)
        disk.make_folder(draft)
        files = {
            TENSORS: disk.write_durably(draft / TENSORS, safetensors_bytes(tensors)),
            DOCUMENT: disk.write_durably(draft / DOCUMENT, [json.dumps(document).encode()]),
        }
        manifest = {
            "kind": "hybridtrainer-checkpoint",
            "format": FORMAT,
            "step": step,
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()},
            "extra": dict(extra or {}),
        }
        body = json.dumps(manifest, indent=1).encode() + b"\n"
        disk.write_durably(draft / MANIFEST, [body + hashlib.sha256(body).hexdigest().encode()])
        disk.sync_folder(draft)
        _publish(draft, folder)
    except BaseException as error:
        _discard(draft)
        if not isinstance(error, OSError):
            raise
        raise SaveError(
            f"The checkpoint {folder} was not written: {error.strerror or error}. The one before it is untouched.",
            "Free some space or choose another folder; training can go on from memory.",
        ) from error


def read_checkpoint(folder: Path) -> Checkpoint:
    """Opens a checkpoint and verifies every byte of it.

    Raises:
        CorruptCheckpointError: if anything is missing, damaged or not a checkpoint.
        ForeignCheckpointError: if it was made by another version of the format.
    """
    previous = _previous(folder)
    if not folder.exists() and previous.is_dir():
        folder = previous  # a crash between two renames: the old one is whole
    manifest = _read_manifest(folder)
    for name in (TENSORS, DOCUMENT):
        _verify_file(folder, name, manifest)
    try:
        document = json.loads((folder / DOCUMENT).read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise _corrupt(folder, f"{DOCUMENT} cannot be read ({error}).") from error
    return Checkpoint(folder, manifest, document)


class CheckpointStore:
    """The checkpoints of one run: numbered in the order in which they were saved.

    The number, not the clock, decides which is newest: a roll-back turns the clock back.
    """

    def __init__(self, root: Path, keep_last: int) -> None:
        self.root = root
        self.keep_last = keep_last

    def save(self, state: Tree, step: int, extra: Mapping[str, Any] | None = None) -> Path:
        """Writes the next checkpoint, then deletes those beyond `keep_last`."""
        folders = self.folders()
        number = 1 + max((_number(folder) for folder in folders), default=0)
        folder = self.root / f"{number:06d}-step-{step}"
        try:
            if not self.root.is_dir():
                disk.make_folder(self.root)
        except OSError as error:
            raise SaveError(f"{self.root} cannot be made: {error.strerror}.", "Choose another run folder.") from error
        write_checkpoint(folder, state, step, extra)
        self.prune()
        return folder

    def folders(self) -> list[Path]:
        """All finished checkpoints, oldest first; drafts and foreign folders are not among them."""
        if not self.root.is_dir():
            return []
        found = [entry for entry in self.root.iterdir() if _FINISHED.fullmatch(entry.name) and entry.is_dir()]
        return sorted((entry for entry in found if not entry.is_symlink()), key=_number)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies; damaged ones are passed over."""
        for folder in reversed(self.folders()):
            try:
                return read_checkpoint(folder)
            except CorruptCheckpointError:
                continue
        return None

    def prune(self) -> None:
        """Deletes all but the newest `keep_last` that look whole, and never the last one that does."""
        whole = [folder for folder in self.folders() if _looks_whole(folder)]
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


def safetensors_bytes(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The safetensors format, tensor by tensor: only one of them is ever copied to host memory."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Json] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
            raise ModelError(
                f"The tensor `{name}` is {tensor.dtype}, {tensor.layout}, which a checkpoint cannot hold.",
                "Keep such values as dense tensors of an ordinary type.",
            )
        end = offset + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield from tensor_bytes(tensors[name])


def _read_manifest(folder: Path) -> Mapping[str, Any]:
    path = folder / MANIFEST
    try:
        if path.is_symlink() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise _corrupt(folder, "its manifest is not a small plain file.")
        raw = path.read_bytes()
    except OSError as error:
        raise _corrupt(folder, f"its manifest cannot be read ({error.strerror}).") from error
    body, newline, digest = raw.rpartition(b"\n")
    if hashlib.sha256(body + newline).hexdigest().encode() != digest:
        raise _corrupt(folder, "its manifest does not match its own checksum.")
    try:
        manifest = json.loads(body)
        kind, version = manifest["kind"], manifest["format"]
        int(manifest["step"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _corrupt(folder, "its manifest is not one of ours.") from error
    if kind != "hybridtrainer-checkpoint":
        raise _corrupt(folder, "its manifest is not one of ours.")
    if version != FORMAT:
        raise ForeignCheckpointError(
            f"{folder} has checkpoint format {version}; this version reads format {FORMAT}.",
            "Load it with the version of HybridTrainer that wrote it.",
        )
    return dict(manifest)


def _verify_file(folder: Path, name: str, manifest: Mapping[str, Any]) -> None:
    path = folder / name
    try:
        size, digest = manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]
        if path.is_symlink() or path.stat().st_size != size:
            raise _corrupt(folder, f"{name} does not have the {size} bytes it should.")
        if name == DOCUMENT and size > MAX_DOCUMENT_BYTES:
            raise _corrupt(folder, f"{name} is larger than any real one.")
        if disk.file_digest(path) != digest:
            raise _corrupt(folder, f"{name} does not match its checksum.")
    except (OSError, KeyError, TypeError) as error:
        raise _corrupt(folder, f"{name} cannot be read ({error}).") from error


def _looks_whole(folder: Path) -> bool:
    """Whether manifest and sizes agree; reading every byte at each save would cost too much."""
    try:
        manifest = _read_manifest(folder)
        return all((folder / name).stat().st_size == manifest["files"][name]["bytes"] for name in (TENSORS, DOCUMENT))
    except (CorruptCheckpointError, ForeignCheckpointError, OSError, KeyError, TypeError):
        return False


def _discard(folder: Path) -> None:
    try:
        disk.remove_folder(folder)
    except OSError:
        return  # the next start sweeps it


def _number(folder: Path) -> int:
    match = _FINISHED.fullmatch(folder.name)
    return int(match.group(1)) if match else 0


def _corrupt(folder: Path, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{folder} is not a usable checkpoint: {why}",
        "Use an older one, or `hybridtrainer resume`, which finds the newest sound one.",
    )
