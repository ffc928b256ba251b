"""A run folder as plain data."""

from __future__ import annotations

import pytest
from tests.report.making import make_run, records, write_log

from hybridtrainer.errors import RunFolderError
from hybridtrainer.report.runs import read_run


def test_a_whole_run_is_read(tmp_path):
    run = read_run(make_run(tmp_path / "mine", 300))
    assert run.name == "mine" and run.status == "finished" and run.steps == 300
    assert run.jumped("kept") + run.jumped("refused") + run.jumped("rolled back") == len(run.jumps) > 3
    assert run.foreseen_steps == 4 * run.jumped("kept")
    assert run.last_evaluation is not None and set(run.last_evaluation[1]) == {"loss", "accuracy"}
    assert run.forecasts.short and run.forecasts.final and run.memory
    assert run.settings["optimizer.lr"] == "0.002" and run.environment["torch"] == "2.13.0"
    assert run.declined == {"confidence # is below #": 3}


def test_a_log_alone_is_enough(tmp_path):
    run = read_run(write_log(tmp_path, records(100, new_kinds=False)))
    assert run.settings == {} and run.environment == {} and run.memory == []
    assert not run.forecasts.short and not run.forecasts.final


def test_a_torn_last_line_is_left_out_and_said(tmp_path):
    folder = make_run(tmp_path / "torn", 100)
    whole = read_run(folder)
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"v": 1, "kind": "st')
    torn = read_run(folder)
    assert torn.steps == whole.steps
    assert any("torn" in text for _, _, text in torn.remarks)


@pytest.mark.parametrize("content", ["", '{"v": 1, "ki', '{"v": 1, "kind": "resume", "continues_at": 0}\n'])
def test_a_log_with_nothing_in_it_is_refused(tmp_path, content):
    (tmp_path / "log.jsonl").write_text(content)
    with pytest.raises(RunFolderError, match=r"empty|nothing"):
        read_run(tmp_path)


def test_a_damaged_line_in_the_middle_is_refused(tmp_path):
    folder = make_run(tmp_path / "bad", 50)
    lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    (folder / "log.jsonl").write_text("".join([*lines[:20], "{half\n", *lines[20:]]))
    with pytest.raises(RunFolderError, match="damaged line"):
        read_run(folder)


def test_damaged_small_files_are_said_and_do_not_stop_the_report(tmp_path):
    folder = make_run(tmp_path / "run", 50)
    for name in ("config.toml", "environment.json", "statistics.json"):
        (folder / name).write_text("{{{")
    run = read_run(folder)
    assert sum("is damaged" in text for _, _, text in run.remarks) == 3
