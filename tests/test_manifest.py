"""A manifest names exactly the files there must be, and whatever is wrong with one of them is found."""

from __future__ import annotations

import json

import pytest
import torch

from hybridtrainer import manifest
from hybridtrainer.checkpoint import read_checkpoint, write_checkpoint
from hybridtrainer.errors import CorruptCheckpointError, ForeignCheckpointError


def content(folder):
    return json.loads((folder / manifest.MANIFEST).read_bytes().rpartition(b"\n")[0])


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path / "checkpoint", {"w": torch.ones(2)}, 3)
    return tmp_path / "checkpoint"


def test_a_sound_checkpoint_has_no_damage(folder):
    found = manifest.read_manifest(folder)
    names = manifest.file_names(folder, found)
    assert names == ["state.safetensors", "state.json"]
    assert manifest.damage(folder, names, found) == "" and manifest.looks_whole(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": {"count": 2}},
        {"ranks": {"count": 10**9}},
        {"ranks": {}},
        {"ranks": 3},
        {"files": {}},
        {"files": None},
        {"files": {"../../secret": {"bytes": 1, "sha256": ""}}},
        {"kind": "something else"},
        {"step": "soon"},
    ],
)
def test_a_manifest_that_names_other_files_is_refused(folder, change):
    (folder / manifest.MANIFEST).write_bytes(manifest.as_bytes({**content(folder), **change}))
    with pytest.raises(CorruptCheckpointError, match="manifest"):
        read_checkpoint(folder)
    assert not manifest.looks_whole(folder)


def test_another_format_is_foreign(folder):
    (folder / manifest.MANIFEST).write_bytes(manifest.as_bytes({**content(folder), "format": 99}))
    with pytest.raises(ForeignCheckpointError, match="format 99"):
        manifest.read_manifest(folder)


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_damage_is_named(folder, name):
    found = manifest.read_manifest(folder)
    path = folder / name
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)
    assert manifest.damage_of(folder, name, found) == f"{name} does not match its checksum."
    path.write_bytes(raw[:-1])
    assert "bytes it should" in manifest.damage_of(folder, name, found)
    path.unlink()
    assert "cannot be read" in manifest.damage_of(folder, name, found)
