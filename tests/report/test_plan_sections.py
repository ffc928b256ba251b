"""Plan against actual on the page: a table where a run was planned, reasons where something is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.report.making import make_run, records, write_log

from hybridtrainer.observe.against_plan import Actual, against_plan
from hybridtrainer.records import Planned
from hybridtrainer.report import write_report
from hybridtrainer.report.plan_sections import plan_section
from hybridtrainer.report.runs import Run, read_run

GIB = 1 << 30
PLANNED = Planned("planned: so", 4 * GIB, 2 * GIB, seconds=0.2)


def planned_run(folder: Path, **changes: Any) -> Run:
    result = against_plan(PLANNED, Actual(60, 0, 5 * GIB, 2 * GIB, 0.2, 57))
    record = {"v": 1, "kind": "plan", **asdict(result), **changes}
    return read_run(write_log(folder, [*records(60), record]))


def rows_of(*runs: Run) -> list[list[str]]:
    section = plan_section({run.name: run.plan for run in runs if run.plan is not None})
    assert section is not None and section.title == "Plan against actual"
    (table,) = section.tables
    assert all(len(row) == len(table.columns) for row in table.rows)
    return [list(row) for row in table.rows]


def test_a_planned_run_has_a_row_for_each_figure_and_its_remarks(tmp_path):
    run = planned_run(tmp_path / "run")
    assert rows_of(run) == [
        ["GPU memory", "4.00 GiB", "5.00 GiB", "-20.0%", ""],
        ["host memory", "2.00 GiB", "2.00 GiB", "+0.0%", ""],
        ["seconds a step", "200 ms", "200 ms", "+0.0%", "median of 57 steps"],
    ]
    page = write_report([tmp_path / "run"]).read_text()
    assert "Plan against actual" in page and "GPU memory is more than 5% off" in page


def test_a_run_that_was_not_planned_has_no_section(tmp_path):
    run = read_run(make_run(tmp_path / "run", 60))
    assert run.plan is None and plan_section({}) is None
    assert "Plan against actual" not in write_report([tmp_path / "run"]).read_text()


def test_of_several_runs_each_is_named(tmp_path):
    one, other = planned_run(tmp_path / "one"), planned_run(tmp_path / "other")
    assert [row[0] for row in rows_of(one, other)] == ["one"] * 3 + ["other"] * 3
    section = plan_section({run.name: run.plan for run in (one, other) if run.plan is not None})
    assert section is not None and [text.split(":")[0] for text in section.texts] == ["one", "other"]


def test_a_run_without_an_end_shows_what_was_planned(tmp_path):
    folder = make_run(tmp_path / "run", 60)
    (folder / "plan.json").write_text(json.dumps(asdict(PLANNED)))
    assert rows_of(read_run(folder)) == [
        ["GPU memory", "4.00 GiB", "-", "unavailable", "the log has no end"],
        ["host memory", "2.00 GiB", "-", "unavailable", "the log has no end"],
        ["seconds a step", "200 ms", "-", "unavailable", "the log has no end"],
    ]


def test_a_damaged_plan_is_said_and_left_out(tmp_path):
    folder = make_run(tmp_path / "run", 60)
    (folder / "plan.json").write_text("{")
    run = read_run(folder)
    assert run.plan is None
    assert (None, "file", "plan.json is damaged and was left out.") in run.remarks


def test_whatever_a_log_holds_is_shown_as_text(tmp_path):
    odd = {"name": "<b>", "planned": "much", "actual": True, "difference": "nan", "missing": ["<script>"]}
    run = planned_run(
        tmp_path / "run", figures=[odd, 7, None], remarks=["<script>alert(1)</script>", 3], timed_steps="x"
    )
    assert rows_of(run) == [["<b>", "-", "-", "unavailable", "['<script>']"]]
    assert "<script>alert" not in write_report([tmp_path / "run"]).read_text()
    assert planned_run(tmp_path / "none", figures=3, remarks=None).plan is not None
