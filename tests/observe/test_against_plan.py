"""A plan beside what was measured: a share where both are known, a reason where one is not, an explanation beyond."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from hybridtrainer.observe.against_plan import FILLING, GPU, HOST, SECONDS, Actual, against_plan, result_text, shown
from hybridtrainer.records import PlanFigure, Planned

GIB = 1 << 30
PLANNED = Planned("planned: so", 4 * GIB, 2 * GIB, GIB, seconds=0.2, speeds="measured on 2026-11-01")
TAKEN = Actual(200, 0, 4 * GIB, 2 * GIB, 0.2, 190)


def figures(planned: Planned = PLANNED, actual: Actual = TAKEN) -> dict[str, PlanFigure]:
    return {figure.name: figure for figure in against_plan(planned, actual).figures}


def test_each_figure_is_the_plan_as_a_share_of_what_was_taken():
    found = figures(actual=replace(TAKEN, gpu_bytes=5 * GIB, host_bytes=GIB, seconds=0.25))
    assert found[GPU].difference == pytest.approx(-0.2)
    assert found[HOST].difference == pytest.approx(1.0)
    assert found[SECONDS].difference == pytest.approx(-0.2)
    assert {figure.missing for figure in found.values()} == {""}
    assert (found[GPU].limit, found[HOST].limit, found[SECONDS].limit) == (0.05, 0.05, 0.15)


@pytest.mark.parametrize(
    ("planned", "actual", "name", "words"),
    [
        (PLANNED, replace(TAKEN, gpu_bytes=None), GPU, "there is no GPU"),
        (PLANNED, replace(TAKEN, gpu_bytes=None), SECONDS, "there is no GPU"),
        (replace(PLANNED, gpu_bytes=None), TAKEN, GPU, "there is no GPU"),
        (PLANNED, replace(TAKEN, host_bytes=None), HOST, "the system does not say"),
        (PLANNED, replace(TAKEN, host_bytes=0), HOST, "the system does not say"),
        (PLANNED, replace(TAKEN, seconds=None, timed_steps=2), SECONDS, "2 steps could be timed, and 5 are needed"),
        (replace(PLANNED, seconds=None, why_no_seconds="so"), TAKEN, SECONDS, "so"),
        (PLANNED, Actual(is_over=False), GPU, "the log has no end"),
        (PLANNED, Actual(is_over=False), SECONDS, "the log has no end"),
    ],
)
def test_what_is_not_known_has_a_reason_and_is_never_nought(planned, actual, name, words):
    figure = figures(planned, actual)[name]
    assert (figure.difference, figure.missing) == (None, words)
    text = result_text(against_plan(planned, actual))
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    assert line.endswith(f"  unavailable: {words}") and " 0.0" not in line


def test_what_jumps_take_is_planned_once_one_was_tried_and_not_guessed_before():
    held = replace(TAKEN, host_bytes=3 * GIB)
    assert figures(actual=replace(held, jumps="all"))[HOST].difference == 0.0
    assert figures(actual=held)[HOST].difference == pytest.approx(-1 / 3)
    filling = figures(actual=replace(held, jumps="windows"))[HOST]
    assert (filling.difference, filling.missing, filling.actual) == (None, FILLING, 3 * GIB)
    next_to_nothing = replace(PLANNED, jump_host_bytes=GIB // 100)
    assert figures(next_to_nothing, replace(held, jumps="windows"))[HOST].difference is not None


def test_within_the_limits_nothing_is_explained():
    near = replace(TAKEN, gpu_bytes=int(3.85 * GIB), host_bytes=int(2.1 * GIB), seconds=0.23)
    assert against_plan(PLANNED, near).remarks == ()


@pytest.mark.parametrize(
    ("planned", "actual", "words"),
    [
        (PLANNED, replace(TAKEN, gpu_bytes=5 * GIB), "GPU memory is more than 5% off, usually by other tensors"),
        (PLANNED, replace(TAKEN, gpu_bytes=3 * GIB), "GPU memory is more than 5% off, usually by steps smaller"),
        (PLANNED, replace(TAKEN, host_bytes=3 * GIB), "data that this process holds"),
        (PLANNED, replace(TAKEN, host_bytes=GIB), "other versions of Python"),
        (replace(PLANNED, gpu_bytes=None), replace(TAKEN, host_bytes=GIB), "ran on a CPU"),
        (PLANNED, replace(TAKEN, seconds=0.3), "is other processes on this GPU"),
        (replace(PLANNED, waits_for_host=True), replace(TAKEN, seconds=0.3), "is a step that waits for the host"),
        (replace(PLANNED, speeds="given: a sheet"), replace(TAKEN, seconds=0.1), "on this machine (given: a sheet). `"),
        (
            replace(PLANNED, speeds="given", waits_for_host=True),
            replace(TAKEN, seconds=0.1),
            "(given), and a step that",
        ),
    ],
)
def test_beyond_the_limits_one_sentence_says_what_usually_explains_it(planned, actual, words):
    (remark,) = against_plan(planned, actual).remarks
    assert words in remark
    assert ("`hybridtrainer doctor --calibrate`" in remark) == remark.startswith("Seconds")


def test_a_resumed_process_says_from_where_it_was_measured():
    found = against_plan(PLANNED, replace(TAKEN, from_step=1200))
    assert found.from_step == 1200
    assert found.remarks == ("Measured from step 1,200 on, where this process resumed the run.",)


def test_as_text_it_is_a_line_for_each_figure():
    found = against_plan(PLANNED, replace(TAKEN, gpu_bytes=int(4.1 * GIB), seconds=0.19))
    assert [line.split() for line in result_text(found).splitlines()] == [
        ["plan", "against", "actual", "planned", "actual", "plan", "off", "by"],
        ["GPU", "memory", "4.00", "GiB", "4.10", "GiB", "-2.4%"],
        ["host", "memory", "2.00", "GiB", "2.00", "GiB", "+0.0%"],
        ["seconds", "a", "step", "200", "ms", "190", "ms", "+5.3%", "(median", "of", "190)"],
    ]
    assert shown(SECONDS, None) == "-"


def test_as_data_it_is_json():
    found = json.loads(json.dumps(asdict(against_plan(PLANNED, TAKEN))))
    assert [figure["difference"] for figure in found["figures"]] == [0.0, 0.0, 0.0]
