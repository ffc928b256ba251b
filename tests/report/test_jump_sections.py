"""What the page says of jumps."""

from __future__ import annotations

import json

from tests.report.making import make_run, records, write_log

from hybridtrainer.report.detail import Detail
from hybridtrainer.report.jump_sections import jump_section
from hybridtrainer.report.jumps import without_figures
from hybridtrainer.report.runs import read_run


def test_jumps_are_drawn_counted_and_listed(tmp_path):
    run = read_run(make_run(tmp_path / "run", 600))
    section = jump_section([run], Detail(1))
    kept, refused, undone = (run.jumped(name) for name in ("kept", "refused", "rolled back"))
    assert section.texts[0] == f"{len(run.jumps)} jumps tried: {kept} kept, {refused} refused and {undone} rolled back."
    for figure in section.figures:
        assert (figure.svg.count('"p dot'), figure.svg.count('"p cross'), figure.svg.count('"p triangle')) == (
            kept, refused, undone,
        )  # fmt: skip
    assert sum(int(row[2]) for row in section.tables[0].rows) == len(run.jumps)
    assert len(section.folded[0].rows) == len(run.jumps)


def test_a_long_list_says_how_many_jumps_it_left_out(tmp_path):
    run = read_run(make_run(tmp_path / "run", 5000))
    section = jump_section([run], Detail(1))
    shown = len(section.folded[0].rows)
    assert shown < len(run.jumps) and f"{len(run.jumps) - shown} are left out" in section.folded[0].note
    assert "jumps are drawn" in section.figures[0].note


def test_a_run_without_jumps_says_so_and_why(tmp_path):
    plain = [record for record in records(100, new_kinds=False) if record["kind"] not in ("jump", "phase")]
    folder = write_log(tmp_path / "plain", plain)
    (folder / "statistics.json").write_text('{"declined": {"not sure": 3}}')
    section = jump_section([read_run(folder)], Detail(1))
    assert list(section.texts) == ["This run tried no jump.", "plain declined: not sure (3)"]


def test_jumps_that_were_not_probed_are_listed_and_not_drawn(tmp_path):
    content = [{"v": 1, "kind": "jump", "step": 5, "verdict": "refused", "reason": "not finite", "probe_after": "nan"}]
    run = read_run(write_log(tmp_path / "odd", [*records(60), *content]))
    section = jump_section([run], Detail(1))
    assert section.figures == [] and len(section.folded[0].rows) == 1


def test_a_reason_that_a_notice_gives_has_its_figures(tmp_path):
    why = "the learning rate will fall to 5% of its peak, and jumps do harm then"
    content = [record for record in records(60, new_kinds=False) if record["kind"] == "step"]
    notice = {"v": 1, "kind": "notice", "step": 0, "text": f"no jumps: {why}"}
    folder = write_log(tmp_path / "plain", [notice, *content])
    (folder / "statistics.json").write_text(json.dumps({"declined": {without_figures(why): 1, "confidence #": 2}}))
    assert list(jump_section([read_run(folder)], Detail(1)).texts)[1:] == [
        f"plain declined: {why} (1)", "plain declined: confidence ... (2)",
    ]  # fmt: skip
