"""The run log: readable after any crash, as if the run had never been interrupted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hybridtrainer.errors import RunFolderError
from hybridtrainer.observe.runlog import RunLog, read_log
from hybridtrainer.records import JumpRecord, Phase, PhaseChange, StepResult


def step(number: int, loss: float = 2.5) -> StepResult:
    return StepResult(number, Phase.FULL, loss, 0, None, 0.1, "")


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_log(path) if record["kind"] == "step"]


def test_records_come_back_in_order_with_their_kind(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.record(step(1))
        log.record(PhaseChange(1, Phase.WARMUP, Phase.FULL, 'a "reason"\nwith\r lines \u2028 é'))
        log.record(JumpRecord(2, 15, "line_fit", 0.9, "refused", "because"))
        log.write("end", status="done", seconds=1.5)
    first, second, third, last = read_log(path)
    assert (first["kind"], first["step"], first["loss"], first["confidence"]) == ("step", 1, 2.5, None)
    assert (second["kind"], second["after"]) == ("phase", "full")
    assert second["reason"] == 'a "reason"\nwith\r lines \u2028 é'
    assert (third["kind"], third["verdict"]) == ("jump", "refused")
    assert last == {"v": 1, "kind": "end", "status": "done", "seconds": 1.5}


def test_a_record_is_in_the_file_when_write_returns(tmp_path):
    log = RunLog(tmp_path / "log.jsonl")
    log.record(step(1))
    assert steps_in(tmp_path / "log.jsonl") == [1]
    assert log.size() == (tmp_path / "log.jsonl").stat().st_size
    log.sync()
    log.close()


def strict(line: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_what_is_not_finite_is_written_as_json_and_can_be_read(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.record(step(1, math.nan))
        log.write("evaluation", loss=math.inf, best=-math.inf)
    for line in path.read_text().splitlines():
        strict(line)
    first, second = read_log(path)
    assert math.isnan(float(first["loss"]))
    assert (float(second["loss"]), float(second["best"])) == (math.inf, -math.inf)


def test_what_is_not_finite_inside_a_value_is_written_as_json_too(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.write("evaluation", metrics={"accuracy": math.nan}, losses=[1.0, math.inf], pair=(math.nan, 1))
    record = strict(path.read_text())
    assert math.isnan(float(record["metrics"]["accuracy"]))
    assert float(record["losses"][1]) == math.inf


@pytest.mark.parametrize("torn", [b"{", b'{"v": 1, "kind": "step", "st', b'{"v": 1, "kind": "end"}', b"\xff\xfe"])
def test_a_torn_last_line_is_left_out_and_cut_before_more_is_written(tmp_path, torn):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.record(step(1))
        log.record(step(2))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert steps_in(path) == [1, 2]
    with RunLog(path) as log:
        assert log.size() == len(whole)
        log.record(step(3))
    assert steps_in(path) == [1, 2, 3]


def test_a_log_of_nothing_but_a_torn_line_is_empty(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"v": 1')
    assert read_log(path) == []
    with RunLog(path) as log:
        assert log.size() == 0


def test_a_torn_line_of_any_length_is_cut(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.record(step(1))
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x" * ((1 << 20) + 1000))
    with RunLog(path) as log:
        assert log.size() == size
        log.record(step(2))
    assert steps_in(path) == [1, 2]


def test_resuming_leaves_out_what_is_done_again(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        for number in (1, 2, 3):
            log.record(step(number))
        at_checkpoint = log.size()
        for number in (4, 5):
            log.record(step(number, loss=9.0))
    with RunLog(path, continues_at=at_checkpoint) as log:
        for number in (4, 5, 6):
            log.record(step(number, loss=1.0))
    records = read_log(path)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in records if record["kind"] == "step"] == [2.5] * 3 + [1.0] * 3
    assert [record["kind"] for record in records].count("resume") == 1
    assert b"9.0" in path.read_bytes()  # nothing is ever erased


def test_a_run_can_be_resumed_again_and_again(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.record(step(1))
        first = log.size()
        log.record(step(2, loss=9.0))
    with RunLog(path, continues_at=first) as log:
        log.record(step(2))
        second = log.size()
        log.record(step(3, loss=9.0))
    with RunLog(path, continues_at=second) as log:
        log.record(step(3))
    assert steps_in(path) == [1, 2, 3]
    with RunLog(path, continues_at=first) as log:  # from the older checkpoint once more
        log.record(step(2, loss=7.0))
    assert steps_in(path) == [1, 2]
    assert [record["loss"] for record in read_log(path) if record["kind"] == "step"] == [2.5, 7.0]
    with RunLog(path, continues_at=0) as log:
        log.record(step(1))
    assert steps_in(path) == [1]


def test_resuming_after_a_crash_in_the_middle_of_a_line(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.record(step(1))
        at_checkpoint = log.size()
        log.record(step(2))
    path.write_bytes(path.read_bytes()[:-5])
    with RunLog(path, continues_at=at_checkpoint) as log:
        log.record(step(2))
        log.record(step(3))
    assert steps_in(path) == [1, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        b"{broken",
        b"",
        b"[1, 2]",
        b"null",
        b"3",
        b'"text"',
        b"{}",
        b'{"v": 1}',
        b'{"kind": "step"}',
        b"\xff\xfe",
        b'{"v": 1, "kind": "resume"}',
        b'{"v": 1, "kind": "resume", "continues_at": "x"}',
    ],
)
def test_a_damaged_line_in_the_middle_is_an_error_that_says_where(tmp_path, line):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.record(step(1))
        start = log.size()
    with path.open("ab") as file:
        file.write(line + b"\n")
    with RunLog(path) as log:
        log.record(step(2))
    with pytest.raises(RunFolderError, match=f"damaged line at byte {start}"):
        read_log(path)


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"v": 2, "kind": "step"}\n')
    with pytest.raises(RunFolderError, match="version 2"):
        read_log(path)


def test_a_missing_log_and_an_unwritable_place_are_refused(tmp_path):
    with pytest.raises(RunFolderError, match="There is no log"):
        read_log(tmp_path / "none.jsonl")
    for path in (tmp_path / "no" / "folder.jsonl", tmp_path):
        with pytest.raises(RunFolderError, match="cannot be written"):
            RunLog(path)


def test_a_link_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (tmp_path / "log.jsonl").symlink_to(precious)
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunLog(tmp_path / "log.jsonl")
    assert precious.read_text() == "keep me"
