"""Snapshots in files: what is written is read, None stays None, and torn or foreign files are told apart."""

from __future__ import annotations

import json

import pytest

from hybridtrainer.errors import RunFolderError
from hybridtrainer.observe.snapshots import COLUMNS, Snapshot, SnapshotFile, read_snapshots, write_snapshots


def snapshot(step: int, phase: str = "full", peak: int | None = 100, seconds: float | None = None) -> Snapshot:
    at = float(step) if seconds is None else seconds
    return Snapshot(step, phase, at, peak, peak, None, None, 7, 10, 20, 10, None if peak is None else peak - 40)


SNAPSHOTS = [snapshot(1, "warmup"), snapshot(2, peak=None), snapshot(17, 'odd, "phase"', 5 << 40)]


def test_a_csv_file_is_read_as_it_was_written(tmp_path):
    write_snapshots(tmp_path / "a.csv", SNAPSHOTS)
    assert read_snapshots(tmp_path / "a.csv") == SNAPSHOTS


def test_json_lines_have_every_figure_and_null_for_what_is_not_known(tmp_path):
    write_snapshots(tmp_path / "a.jsonl", SNAPSHOTS)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [tuple(line) for line in lines] == [COLUMNS] * 3
    assert lines[1]["peak_bytes"] is None and lines[2]["peak_bytes"] == 5 << 40


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="End its name"):
        write_snapshots(tmp_path / "a.txt", SNAPSHOTS)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_a_typed_error(tmp_path):
    with pytest.raises(RunFolderError, match="cannot be written"):
        write_snapshots(tmp_path / "no" / "a.csv", SNAPSHOTS)
    with pytest.raises(RunFolderError, match="cannot be written"):
        SnapshotFile(tmp_path / "no" / "a.csv")


def test_an_appended_file_is_there_soon_after_and_is_the_same_as_an_exported_one(tmp_path):
    now = [0.0]
    file = SnapshotFile(tmp_path / "a.csv", clock=lambda: now[0])
    for at, taken in zip((3.0, 5.0, 6.0), SNAPSHOTS, strict=True):
        now[0] = at
        file.append(taken)
    assert read_snapshots(tmp_path / "a.csv") == SNAPSHOTS[:2]  # not closed yet
    file.close()
    write_snapshots(tmp_path / "b.csv", SNAPSHOTS)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_a_resumed_file_keeps_what_belongs_to_its_checkpoint(tmp_path):
    path = tmp_path / "a.csv"
    file = SnapshotFile(path)
    file.append(SNAPSHOTS[0])
    size = file.size()
    file.append(SNAPSHOTS[1])
    file.close()
    again = SnapshotFile(path, size)
    again.append(SNAPSHOTS[2])
    again.close()
    assert read_snapshots(path) == [SNAPSHOTS[0], SNAPSHOTS[2]]
    SnapshotFile(path).close()
    assert read_snapshots(path) == []


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "a.csv").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(RunFolderError):
        SnapshotFile(tmp_path / "a.csv")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "a.csv"
    write_snapshots(path, SNAPSHOTS)
    path.write_bytes(path.read_bytes()[:-5])
    assert read_snapshots(path) == SNAPSHOTS[:2]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", ",".join(COLUMNS) + "\n1,full\n", ",".join(COLUMNS) + "\nx" * 9])
def test_what_is_no_profile_is_refused(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(RunFolderError, match="no profile"):
        read_snapshots(tmp_path / "a.csv")
