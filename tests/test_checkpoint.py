"""Checkpoints: what is written can be read, what is damaged is refused, what is malicious does nothing."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridtrainer import checkpoint, manifest
from hybridtrainer.checkpoint import CheckpointStore, read_checkpoint, write_checkpoint
from hybridtrainer.errors import CorruptCheckpointError, ForeignCheckpointError, ModelError, SaveError


def some_state(step: int = 0) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": {"a": torch.randn(7, 5, generator=generator), "b": torch.randn(3, generator=generator).bfloat16()},
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "sliced": torch.arange(20).view(4, 5).T,
        "numbers": {"betas": (0.9, 0.95), "best": float("inf"), "step": step},
    }


def assert_same(a: object, b: object) -> None:
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert isinstance(b, dict) and a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert a == b and type(a) is type(b)


def test_what_is_written_is_read_again(tmp_path):
    write_checkpoint(tmp_path / "one", some_state(3), step=3, extra={"note": 1})
    read = read_checkpoint(tmp_path / "one")
    assert_same(read.state(), some_state(3))
    assert read.step == 3 and read.manifest["extra"] == {"note": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]


def test_the_tensor_file_is_plain_safetensors(tmp_path):
    write_checkpoint(tmp_path / "one", some_state(), step=0)
    tensors = load_file(tmp_path / "one" / checkpoint.TENSORS)
    assert torch.equal(tensors["weights/a"], some_state()["weights"]["a"])  # type: ignore[index]


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path):
    write_checkpoint(tmp_path / "one", some_state(1), step=1)
    write_checkpoint(tmp_path / "one", some_state(2), step=2)
    assert read_checkpoint(tmp_path / "one").step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_every_one_of_2000_bit_flips_is_found(tmp_path):
    folder = tmp_path / "one"
    write_checkpoint(folder, some_state(), step=0)
    files = sorted(folder.iterdir())
    sizes = [file.stat().st_size for file in files]
    draw = random.Random(0)
    for _ in range(2000):
        file = draw.choices(files, weights=sizes)[0]
        raw = bytearray(file.read_bytes())
        position, bit = draw.randrange(len(raw)), draw.randrange(8)
        raw[position] ^= 1 << bit
        file.write_bytes(raw)
        with pytest.raises(CorruptCheckpointError):
            read_checkpoint(folder)
        raw[position] ^= 1 << bit
        file.write_bytes(raw)
    read_checkpoint(folder)


def test_every_truncation_and_every_missing_file_is_found(tmp_path):
    folder = tmp_path / "one"
    write_checkpoint(folder, some_state(), step=0)
    for file in sorted(folder.iterdir()):
        raw = file.read_bytes()
        for length in {0, 1, len(raw) // 2, len(raw) - 1}:
            file.write_bytes(raw[:length])
            with pytest.raises(CorruptCheckpointError):
                read_checkpoint(folder)
        file.unlink()
        with pytest.raises(CorruptCheckpointError):
            read_checkpoint(folder)
        file.write_bytes(raw)
    read_checkpoint(folder)


def test_the_newest_sound_checkpoint_is_used(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=3)
    for step in (1, 2, 3):
        store.save(some_state(step), step)
    newest = store.folders()[-1]
    raw = bytearray((newest / checkpoint.TENSORS).read_bytes())
    raw[-1] ^= 1
    (newest / checkpoint.TENSORS).write_bytes(raw)
    found = store.newest()
    assert found is not None and found.step == 2
    for folder in store.folders():
        (folder / manifest.MANIFEST).unlink()
    assert store.newest() is None


def test_the_order_of_saving_decides_which_is_newest_not_the_clock(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=5)
    for step in (50, 65, 50):  # a roll-back turned the clock back
        store.save(some_state(step), step)
    newest = store.newest()
    assert newest is not None
    assert newest.folder.name == "000003-step-50"


def test_retention_keeps_the_last_ones_and_never_counts_broken_ones(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    store.save(some_state(1), 1)
    store.save(some_state(2), 2)
    (store.folders()[-1] / manifest.MANIFEST).unlink()
    store.save(some_state(3), 3)
    assert [folder.name for folder in store.folders()] == ["000001-step-1", "000002-step-2", "000003-step-3"]
    store.save(some_state(4), 4)
    assert [folder.name for folder in store.folders()] == ["000002-step-2", "000003-step-3", "000004-step-4"]


def test_foreign_folders_and_leftovers_are_not_taken_for_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    real = store.save(some_state(1), 1)
    for name in ("000009-step-9.backup", "step-100", ".writing-000010-step-10-1", ".deleting-000001-step-0"):
        shutil.copytree(real, store.root / name)
    (store.root / "000011-step-11").symlink_to(real)
    assert store.folders() == [real]
    store.sweep()
    left = sorted(path.name for path in store.root.iterdir())
    assert left == ["000001-step-1", "000009-step-9.backup", "000011-step-11", "step-100"]


def test_another_format_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    write_checkpoint(tmp_path / "one", some_state(), step=0)
    monkeypatch.undo()
    with pytest.raises(ForeignCheckpointError, match="format 99"):
        read_checkpoint(tmp_path / "one")


def write_signed(folder: Path, tensors: bytes, document: bytes) -> None:
    """A folder whose checksums are right, whatever is in it."""
    folder.mkdir()
    (folder / checkpoint.TENSORS).write_bytes(tensors)
    (folder / checkpoint.DOCUMENT).write_bytes(document)
    files = {
        name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        for name, raw in ((checkpoint.TENSORS, tensors), (checkpoint.DOCUMENT, document))
    }
    content = {"kind": "hybridtrainer-checkpoint", "format": 1, "step": 0, "files": files, "extra": {}}
    body = json.dumps(content).encode() + b"\n"
    (folder / manifest.MANIFEST).write_bytes(body + hashlib.sha256(body).hexdigest().encode())


HEADER_BOMB = (2**62).to_bytes(8, "little") + b"{}"
BIG_CLAIM = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()


@pytest.mark.parametrize(
    ("tensors", "document"),
    [
        (b"", b'{"w": {"$tensor": "w"}}'),
        (HEADER_BOMB, b'{"w": {"$tensor": "w"}}'),
        (len(BIG_CLAIM).to_bytes(8, "little") + BIG_CLAIM, b'{"w": {"$tensor": "w"}}'),
        (b"\x02\0\0\0\0\0\0\0{}", b'{"w": {"$tensor": "../../etc/passwd"}}'),
        (b"\x02\0\0\0\0\0\0\0{}", b"[" * 100_000 + b"]" * 100_000),
        (b"\x02\0\0\0\0\0\0\0{}", b"\x80\x04\x95 not json but a pickle"),
        (b"\x02\0\0\0\0\0\0\0{}", b'{"w": {"$float": "boom"}}'),
        (b"\x02\0\0\0\0\0\0\0{}", b'{"w": {"$dict": [[1]]}}'),
    ],
)
def test_a_malicious_checkpoint_is_refused_without_running_or_allocating_anything(tmp_path, tensors, document):
    write_signed(tmp_path / "bad", tensors, document)
    with pytest.raises(CorruptCheckpointError):
        read_checkpoint(tmp_path / "bad").state()


def test_an_oversized_document_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_DOCUMENT_BYTES", 10)
    write_checkpoint(tmp_path / "one", some_state(), step=0)
    with pytest.raises(CorruptCheckpointError, match="larger than any real one"):
        read_checkpoint(tmp_path / "one")


def test_links_inside_a_checkpoint_are_not_followed(tmp_path):
    write_checkpoint(tmp_path / "one", some_state(), step=0)
    for name in (checkpoint.TENSORS, checkpoint.DOCUMENT, manifest.MANIFEST):
        file = tmp_path / "one" / name
        file.rename(tmp_path / name)
        file.symlink_to(tmp_path / name)
        with pytest.raises(CorruptCheckpointError):
            read_checkpoint(tmp_path / "one")
        file.unlink()
        (tmp_path / name).rename(file)


def test_no_module_of_the_project_can_unpickle():
    root = Path(checkpoint.__file__).parent
    for file in root.rglob("*.py"):
        text = file.read_text()
        for forbidden in ("import pickle", "torch.load(", "torch.save(", "marshal", "shelve"):
            assert forbidden not in text, f"{file}: {forbidden}"


def test_a_tensor_that_cannot_be_stored_is_named_and_leaves_nothing_behind(tmp_path):
    with pytest.raises(ModelError, match="`sparse`"):
        write_checkpoint(tmp_path / "one", {"sparse": torch.eye(3).to_sparse()}, step=0)
    with pytest.raises(ModelError, match="function"):
        write_checkpoint(tmp_path / "one", {"code": lambda: None}, step=0)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_folder_gives_a_clear_error(tmp_path, monkeypatch):
    def refuse(path: object, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.mkdir", refuse)
    with pytest.raises(SaveError, match="Permission denied"):
        write_checkpoint(tmp_path / "one", some_state(), step=0)


@pytest.mark.parametrize("name", ["mine", "mine.previous"])
def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("years of work")
    with pytest.raises(SaveError, match="is no checkpoint"):
        write_checkpoint(tmp_path / "mine", {"a": 1}, 1)
    assert (tmp_path / name / "thesis.txt").read_text() == "years of work"
    assert len(list(tmp_path.iterdir())) == 1


def test_an_empty_folder_may_become_a_checkpoint(tmp_path):
    (tmp_path / "mine").mkdir()
    write_checkpoint(tmp_path / "mine", {"a": 1}, 1)
    assert read_checkpoint(tmp_path / "mine").state() == {"a": 1}
