"""What the page says of runs."""

from __future__ import annotations

import pytest
from tests.report.making import make_run, records, write_log

from hybridtrainer.report.detail import Detail
from hybridtrainer.report.run_sections import losses, remarks, time_by_phase, verdict
from hybridtrainer.report.runs import read_run


@pytest.fixture
def run(tmp_path):
    return read_run(make_run(tmp_path / "mine", 300))


def test_the_verdict_of_a_run_counts_and_claims_no_speed(run):
    said = verdict(run).text
    kept, refused, undone = (run.jumped(name) for name in ("kept", "refused", "rolled back"))
    assert f"{run.real_steps} real steps and {run.foreseen_steps} foreseen" in said
    assert f"{kept} jumps kept, {refused} refused, {undone} rolled back" in said
    assert "finished at step 300" in said and "Validation at step 300: loss" in said
    assert not any(word in said.lower() for word in ("fast", "speed", "better"))


def test_the_verdict_says_what_is_missing_or_went_wrong(tmp_path):
    content = [record for record in records(100, new_kinds=False) if record["kind"] == "step"]
    plain = verdict(read_run(write_log(tmp_path / "killed", content)))
    assert (
        "still runs, or was killed" in plain.text and "never validated" in plain.text and "no jump tried" in plain.text
    )
    failed = verdict(read_run(write_log(tmp_path / "failed", [*content, {"v": 1, "kind": "error", "error": "E: no"}])))
    assert failed.mood == "bad" and "Error: E: no" in failed.text


def test_the_verdict_says_what_was_foreseen_beside_jumps(tmp_path):
    said = [
        "grown from 2 to 8 blocks, by stack",
        "sample forecasts: in 2.0 passes 10% was",
        "sample forecasts: in 4.0 passes 20% was",
    ]
    notices = [{"v": 1, "kind": "notice", "step": 40 + at, "text": text} for at, text in enumerate(said)]
    text = verdict(read_run(write_log(tmp_path / "grown", [*records(100, new_kinds=False), *notices]))).text
    assert "Grown from 2 to 8 blocks, by stack (step 40)." in text
    assert "Sample forecasts: in 4.0 passes 20% was (step 42)." in text
    assert "2.0 passes" not in text
    assert "By estimate" not in text


def test_the_verdict_says_what_each_kind_of_foresight_was_worth_by_estimate(tmp_path):
    folder = write_log(tmp_path / "worth", records(100, new_kinds=False))
    (folder / "statistics.json").write_text('{"worth_seconds": {"depth": 13.24, "jumps": -2, "odd": "x"}}')
    text = verdict(read_run(folder)).text
    assert "By estimate, depth saved 13.2 s, jumps cost 2.00 s, odd saved 0.00 s: a comparison would have to" in text


def test_one_run_has_its_phases_behind_the_line_and_several_have_strips(run):
    alone, _, *metrics = losses([run], Detail(1)).figures
    assert 'class="band phase-predict"' in alone.svg and 'class="strip"' not in alone.svg
    assert [figure.title for figure in metrics] == [
        "Validation accuracy over training time",
        "Validation accuracy over steps",
    ]
    both = losses([run, run], Detail(2)).figures[0]
    assert both.svg.count('class="strip"') == 2
    assert {"line s0 d0", "line s1 d1"} <= {key.style for key in both.legend}


def test_the_verdict_has_the_training_time_as_the_command_line_says_it(tmp_path):
    content = records(100, new_kinds=False)
    inside = verdict(read_run(write_log(tmp_path / "old", content)))
    assert inside.text.partition(" in ")[2].split(".")[1].endswith("s inside steps")
    content[-1]["training_seconds"] = 1.83
    run = read_run(write_log(tmp_path / "new", content))
    assert "in 1.83 s of training." in verdict(run).text
    assert time_by_phase([run]).tables[0].rows[0][-1] == "1.83 s"


def test_charts_over_time_say_that_it_is_the_time_inside_steps(run):
    for figure in (losses([run], Detail(1)).figures[0], *time_by_phase([run]).figures):
        assert "time inside steps (s)" in figure.svg


def test_time_by_phase_adds_up_to_the_time_inside_steps(run):
    section = time_by_phase([run])
    assert sum(run.seconds_by_phase.values()) == pytest.approx(run.step_seconds)
    assert section.tables[0].columns == [
        "run", "warmup", "full", "predict", "correct", "inside steps", "training in all",
    ]  # fmt: skip
    assert section.figures[0].svg.count('class="p bar') == 4


def test_notices_and_errors_are_listed_or_said_to_be_absent(run, tmp_path):
    assert remarks([run], Detail(1)).tables[0].rows[0][-1] == "a notice of this run"
    silent = read_run(write_log(tmp_path / "silent", [r for r in records(100) if r["kind"] != "notice"]))
    assert remarks([silent], Detail(1)).texts == ("The logs hold no notices and no errors.",)


def test_a_log_of_an_error_before_the_first_step_has_sections_too(tmp_path):
    run = read_run(write_log(tmp_path / "early", [{"v": 1, "kind": "error", "step": 0, "error": "E"}]))
    losses([run], Detail(1))
    time_by_phase([run])
    assert "at step 0" in verdict(run).text
