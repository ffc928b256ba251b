"""The manifest of a checkpoint: which files it has, and whether they are as it says.

Every byte is looked at before anything is made of it. This module does not know what the files mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridtrainer import disk, ranks
from hybridtrainer.errors import CorruptCheckpointError, ForeignCheckpointError
from hybridtrainer.rank_files import name_of
from hybridtrainer.tensor_file import DOCUMENT_ENDING, TENSORS_ENDING
from hybridtrainer.tree import Json

FORMAT = 1
KIND = "hybridtrainer-checkpoint"
MANIFEST = "manifest.json"
MAX_DOCUMENT_BYTES = 64 << 20
MAX_MANIFEST_BYTES = 1 << 20


def as_bytes(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as it is written: JSON, and on the last line its own SHA-256."""
    body = json.dumps(manifest, indent=1).encode() + b"\n"
    return body + hashlib.sha256(body).hexdigest().encode()


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CorruptCheckpointError: if it is missing, damaged or not one of ours.
        ForeignCheckpointError: if it was made by another version of the format.
    """
    path = folder / MANIFEST
    try:
        if path.is_symlink() or path.stat().st_size > MAX_MANIFEST_BYTES:
            raise corrupt(folder, "its manifest is not a small plain file.")
        raw = path.read_bytes()
    except OSError as error:
        raise corrupt(folder, f"its manifest cannot be read ({error.strerror}).") from error
    body, newline, digest = raw.rpartition(b"\n")
    if hashlib.sha256(body + newline).hexdigest().encode() != digest:
        raise corrupt(folder, "its manifest does not match its own checksum.")
    try:
        manifest = json.loads(body)
        kind, version = manifest["kind"], manifest["format"]
        int(manifest["step"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise corrupt(folder, "its manifest is not one of ours.") from error
    if kind != KIND:
        raise corrupt(folder, "its manifest is not one of ours.")
    if version != FORMAT:
        raise ForeignCheckpointError(
            f"{folder} has checkpoint format {version}; this version reads format {FORMAT}.",
            "Load it with the version of HybridTrainer that wrote it.",
        )
    return dict(manifest)


def file_names(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """The files that a checkpoint must have: two for each rank that has saved it."""
    try:
        count = int(manifest["ranks"]["count"]) if "ranks" in manifest else 1
        listed = set(manifest["files"])
    except (ValueError, TypeError, KeyError) as error:
        raise corrupt(folder, "its manifest is not one of ours.") from error
    needed = [
        f"{name_of(rank)}{ending}"
        for rank in range(min(count, len(listed)))
        for ending in (TENSORS_ENDING, DOCUMENT_ENDING)
    ]
    if set(needed) != listed or not needed:
        raise corrupt(folder, "its manifest does not name the files that it should.")
    return needed


def damage(folder: Path, names: Sequence[str], manifest: Mapping[str, Any]) -> str:
    """What is wrong with those files that fall to this rank to look at; empty if nothing is."""
    for name in names[ranks.rank() :: ranks.count()]:
        if found := damage_of(folder, name, manifest):
            return found
    return ""


def damage_of(folder: Path, name: str, manifest: Mapping[str, Any]) -> str:
    """What is wrong with a file; empty if it is as the manifest says."""
    path = folder / name
    try:
        size, digest = manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]
        if path.is_symlink() or path.stat().st_size != size:
            return f"{name} does not have the {size} bytes it should."
        if name.endswith(DOCUMENT_ENDING) and size > MAX_DOCUMENT_BYTES:
            return f"{name} is larger than any real one."
        return "" if disk.file_digest(path) == digest else f"{name} does not match its checksum."
    except (OSError, KeyError, TypeError) as error:
        return f"{name} cannot be read ({error})."


def looks_whole(folder: Path) -> bool:
    """Whether manifest and sizes agree; reading every byte at each save would cost too much."""
    try:
        manifest = read_manifest(folder)
        names = file_names(folder, manifest)
        return all((folder / name).stat().st_size == manifest["files"][name]["bytes"] for name in names)
    except (CorruptCheckpointError, ForeignCheckpointError, OSError, KeyError, TypeError):
        return False


def read_document(folder: Path, name: str) -> Json:
    """A JSON file of a checkpoint."""
    try:
        return json.loads((folder / name).read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise corrupt(folder, f"{name} cannot be read ({error}).") from error


def corrupt(folder: Path, why: str) -> CorruptCheckpointError:
    """The error for a checkpoint that cannot be used."""
    return CorruptCheckpointError(
        f"{folder} is not a usable checkpoint: {why}",
        "Use an older one, or `hybridtrainer resume`, which finds the newest sound one.",
    )
