"""The primitives that make a write durable."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from hybridtrainer import disk


def watch(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    events: list[str] = []

    def watched(name: str, original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            events.append(name)
            return original(*arguments)

        return call

    for name in names:
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    return events


def test_a_file_is_synced_after_its_last_write_and_before_it_is_closed(tmp_path, monkeypatch):
    events = watch(monkeypatch, "write", "fsync", "close")
    size, digest = disk.write_durably(tmp_path / "file", [b"one", memoryview(b"two")])
    assert (size, digest) == (6, hashlib.sha256(b"onetwo").hexdigest())
    assert (tmp_path / "file").read_bytes() == b"onetwo"
    assert events == ["write", "write", "fsync", "close"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    original = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, view: original(descriptor, bytes(view[:3])))
    disk.write_durably(tmp_path / "file", [b"0123456789"])
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_nothing_is_ever_overwritten(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError):
        disk.write_durably(tmp_path / "file", [b"other"])
    assert (tmp_path / "file").read_text() == "precious"


def test_a_rename_is_followed_by_a_sync_of_the_folder(tmp_path, monkeypatch):
    events = watch(monkeypatch, "rename", "fsync")
    (tmp_path / "a").mkdir()
    disk.rename_durably(tmp_path / "a", tmp_path / "b")
    assert events == ["rename", "fsync"]
    assert (tmp_path / "b").is_dir()


def test_removing_a_folder_does_not_follow_links(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    (tmp_path / "link").symlink_to(outside)
    disk.remove_folder(tmp_path / "link")
    disk.remove_folder(tmp_path / "missing")
    assert (outside / "file").read_text() == "precious"


@pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, failing):
    path = tmp_path / "kept.toml"
    path.write_text("old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="No space"):
        broken.setattr(os, failing, full)
        disk.replace_file(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    disk.replace_file(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_far_too_large_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("ä" * 8)
    assert disk.read_small(path, limit_bytes=16) == "ä" * 8
    for large in (path, Path("/dev/zero")):
        with pytest.raises(OSError, match="too large"):
            disk.read_small(large, limit_bytes=15)


def test_a_link_leads_to_what_is_replaced_and_a_pipe_stays_one(tmp_path):
    path, link = tmp_path / "kept.toml", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    disk.replace_file(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    disk.replace_file(pipe, "said")
    assert os.read(reader, 4) == b"said" and pipe.is_fifo()
    os.close(reader)


def test_a_file_that_is_replaced_keeps_who_may_read_it(tmp_path):
    path = tmp_path / "secret.toml"
    path.write_text("old")
    path.chmod(0o600)
    disk.replace_file(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["secret.toml"]


def test_a_link_stays_one_and_an_endless_one_is_no_obstacle(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("link", "loop"):
        disk.replace_file(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"
    assert (tmp_path / "link").is_symlink()


def test_what_the_process_has_open_is_written_to_as_it_is(tmp_path):
    with (tmp_path / "log").open("a+") as log:
        log.write("before, ")
        log.flush()
        disk.replace_file(Path(f"/dev/fd/{log.fileno()}"), "after")
        log.seek(0)
        assert log.read() == "before, after"
