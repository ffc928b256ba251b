"""What the page says of forecasts and of memory."""

from __future__ import annotations

from tests.report.making import make_run

from hybridtrainer.report.detail import Detail
from hybridtrainer.report.forecasts import coverage
from hybridtrainer.report.outlook_sections import forecast_section, memory_section
from hybridtrainer.report.runs import read_run


def test_forecasts_are_shown_with_how_many_held(tmp_path):
    run = read_run(make_run(tmp_path / "run", 300))
    section = forecast_section([run], Detail(1))
    short, final = coverage(run.forecasts.short), coverage(run.forecasts.final)
    assert f"in {short[0]} of {short[1]} what happened lay inside the 90% interval" in section.texts[0]
    assert f"in {final[0]} of {final[1]}" in section.texts[0]
    assert len(section.figures) == 2 and all("90% interval" in figure.svg for figure in section.figures)
    assert "what it turned out to be" in section.figures[1].svg


def test_a_log_without_forecasts_is_said_plainly(tmp_path):
    old = read_run(make_run(tmp_path / "old", 300, new_kinds=False))
    section = forecast_section([old], Detail(1))
    assert "holds no forecasts" in section.texts[0] and "judged by its probe" in section.texts[1]
    assert section.figures == () and section.parts == []


def test_a_run_that_has_not_ended_does_not_know_its_final_loss(tmp_path):
    run = read_run(make_run(tmp_path / "run", 300))
    open_ended = [{**vars(known), "actual": None} for known in run.forecasts.final]
    final = [type(run.forecasts.final[0])(**known) for known in open_ended]
    unfinished = type(run)(**{**vars(run), "forecasts": type(run.forecasts)([], final)})
    section = forecast_section([unfinished], Detail(1))
    assert "has not reached" in section.texts[0] and "not known" in section.figures[0].note


def test_memory_is_shown_by_phase_or_said_to_be_absent(tmp_path):
    run, old = (read_run(make_run(tmp_path / str(new), 300, new_kinds=new)) for new in (True, False))
    section = memory_section([run], Detail(1))
    assert {row[0] for row in section.tables[0].rows} >= {"warmup", "full"}
    assert section.tables[0].columns == ("phase", "host", "device", "device, highest so far")
    assert "time inside steps (s)" in section.figures[0].svg
    assert memory_section([old], Detail(1)).texts == ["Memory was not recorded in this run."]
    assert memory_section([run, old], Detail(2)).texts == ["Memory was not recorded in False."]


def test_where_there_is_no_room_the_charts_of_single_runs_go_and_the_figures_stay(tmp_path):
    run = read_run(make_run(tmp_path / "run", 300))
    brief = Detail(60, 0.0)
    assert forecast_section([run], brief).figures == [] and forecast_section([run], brief).texts
    assert memory_section([run], brief).figures == [] and memory_section([run], brief).tables
