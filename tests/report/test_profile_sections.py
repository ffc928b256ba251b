"""The memory profile on the page: there where a run kept one, with its spikes; damaged ones are said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.report.making import make_run

from hybridtrainer.observe.snapshots import Snapshot, write_snapshots
from hybridtrainer.report.detail import Detail
from hybridtrainer.report.profile_sections import profile_section
from hybridtrainer.report.runs import Run, read_run

MIB = 1 << 20


def taken(step: int, phase: str, peak_mib: int | None) -> Snapshot:
    peak = None if peak_mib is None else peak_mib * MIB
    return Snapshot(step, phase, step * 0.5, peak, peak, None, None, 9 * MIB, 20 * MIB, 40 * MIB, 20 * MIB, 5 * MIB)


def profiled(tmp_path: Path, name: str = "run") -> Run:
    folder = make_run(tmp_path / name, steps=60)
    snapshots = [taken(step, "warmup" if step < 30 else "full", 300 + 200 * (step == 40)) for step in range(1, 61)]
    write_snapshots(folder / "profile.csv", snapshots)
    return read_run(folder)


def test_a_profiles_chart_has_a_line_for_each_component_and_a_mark_for_each_spike(tmp_path):
    section = profile_section([profiled(tmp_path)], Detail(1))
    assert section is not None
    (figure,) = section.figures
    names = [key.name for key in figure.legend]
    assert names[:4] == ["peak of the step", "weights", "optimizer states", "gradients"]
    assert "spike" in names and "taken from the GPU by torch" not in names
    assert str(figure.svg).count("step 40: +200") == 1
    by_phase, spikes = section.tables
    assert [row[:5] for row in by_phase.rows] == [
        ["warmup", "29", "300 MiB", "300 MiB", "300 MiB"],
        ["full", "31", "306 MiB", "500 MiB", "300 MiB"],
    ]
    assert [list(row) for row in spikes.rows] == [["40", "full", "+200 MiB", "500 MiB"]]
    assert section.texts == ("Highest at step 40: 500 MiB. 60 steps in 30.0 s, 2.00 a second.",)


def test_without_a_profile_there_is_no_section(tmp_path):
    run = read_run(make_run(tmp_path / "run", steps=60))
    assert run.profile == []
    assert profile_section([run], Detail(1)) is None


def test_of_several_runs_each_with_a_profile_has_its_part(tmp_path):
    one = profiled(tmp_path, "one")
    section = profile_section([one, replace(one, name="two", profile=[])], Detail(2))
    assert section is not None and [part.title for part in section.parts] == ["one"]
    brief = profile_section([one], Detail(1, 0.0))
    assert brief is not None and not brief.figures and brief.tables


def test_a_damaged_profile_is_said_and_left_out(tmp_path):
    folder = make_run(tmp_path / "run", steps=60)
    (folder / "profile.csv").write_text("step,phase\n<script>,1\n")
    run = read_run(folder)
    assert run.profile == []
    assert (None, "file", "profile.csv is damaged and was left out.") in run.remarks


def test_unknown_phases_and_gaps_are_drawn_as_well(tmp_path):
    run = replace(profiled(tmp_path), profile=[taken(1, "<b>odd</b>", None), taken(2, "<b>odd</b>", 7)])
    section = profile_section([run], Detail(1))
    assert section is not None
    assert "<b>odd" not in str(section.figures[0].svg)
