"""The plan in a run's folder: read as it was written, and no plan where it is damaged."""

from __future__ import annotations

import pytest

from hybridtrainer import disk
from hybridtrainer.errors import RunFolderError
from hybridtrainer.observe.plan_file import PLAN, read_planned, write_planned
from hybridtrainer.records import Planned


@pytest.mark.parametrize("planned", [Planned("so", None, 5), Planned("so", 7, 5, 3, 0.25, "", True, "measured")])
def test_a_plan_is_read_as_it_was_written(tmp_path, planned):
    write_planned(tmp_path, planned)
    assert read_planned(tmp_path) == planned


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", '{"text": 1, "gpu_bytes": 1, "host_bytes": 1}', '{"text": "", "gpu_bytes": "much"}',
             '{"text": "", "gpu_bytes": 1, "host_bytes": "1"}', '{"unknown": 1}',
             '{"text": "", "gpu_bytes": NaN, "host_bytes": 1}',
             '{"text": "", "gpu_bytes": 1, "host_bytes": 1e999}', '{"text": "", "gpu_bytes": -1, "host_bytes": 1}',
             '{"text": "", "gpu_bytes": 1, "host_bytes": 1' + "0" * 400 + "}"],
)  # fmt: skip
def test_a_damaged_file_is_no_plan(tmp_path, text):
    (tmp_path / PLAN).write_text(text)
    assert read_planned(tmp_path) is None


def test_a_link_is_replaced_and_what_it_leads_to_is_left_alone(tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / PLAN).symlink_to(other)
    write_planned(tmp_path / "run", Planned("so", None, 5))
    assert other.read_text() == "mine" and not (tmp_path / "run" / PLAN).is_symlink()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [PLAN]


def test_without_a_file_there_is_no_plan(tmp_path):
    assert read_planned(tmp_path) is None


def test_a_full_disk_is_an_error_of_the_run_folder(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write_durably", full)
    with pytest.raises(RunFolderError, match=r"plan\.json cannot be written: No space left"):
        write_planned(tmp_path, Planned("so", None, 5))
