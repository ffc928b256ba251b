"""What a run takes is measured for its plan: the right steps, the highest memory; the plan outlives the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.memory.cards import GIB, FakeAllocator, card

from hybridtrainer.memory.vram import Vram
from hybridtrainer.observe.against_plan import GPU, HOST, SECONDS
from hybridtrainer.observe.plan_file import PLAN, read_planned
from hybridtrainer.observe.plan_watch import PlanWatch
from hybridtrainer.observe.runlog import RunLog, read_log
from hybridtrainer.records import JumpRecord, Phase, PlanFigure, Planned, StepResult

PLANNED = Planned("planned: so", 4 * GIB, GIB, 2 * GIB, seconds=0.2)
TRIED = JumpRecord(9, 15, "line_fit", 0.9, "refused", "because", seconds=0.5)


def step(number: int, seconds: float, predicted: int = 0, skipped: bool = False) -> StepResult:
    return StepResult(number, Phase.FULL, 2.5, predicted, None, seconds, "", skipped=skipped)


def watching(vram: Vram | None = None, *, clock: int = 0, short_until: int = 0) -> PlanWatch:
    watch = PlanWatch(vram, lambda: GIB)
    watch.planned = PLANNED
    watch.start(pytest.fail, clock, lambda: watch._clock < short_until)
    return watch


def figures(watch: PlanWatch, has_windows: bool = False) -> dict[str, PlanFigure]:
    found = watch.result(has_windows)
    assert found is not None
    return {figure.name: figure for figure in found.figures}


def test_without_a_plan_there_is_nothing_to_hold_a_run_against(tmp_path):
    watch = PlanWatch(None)
    watch.keep_in(tmp_path, is_resumed=False)
    assert watch.result() is None and list(tmp_path.iterdir()) == []


def test_seconds_are_the_median_of_whole_real_steps_without_the_first():
    watch = watching(card(FakeAllocator(1, 2)), short_until=4)
    for number in (1, 2, 3):
        watch.record(step(number, 0.01))  # of a short model
    for number in (4, 5, 6):
        watch.record(step(number, 9.0))  # the first of the whole one
    for number, seconds in enumerate((0.3, 0.1, 0.2), 7):
        watch.record(step(number, seconds))
    watch.record(TRIED)
    watch.record(step(10, 0.9))
    watch.record(step(18, 0.01, predicted=8))
    watch.record(step(19, 0.01, skipped=True))
    few = watch.result()
    assert few is not None and (few.timed_steps, figures(watch)[SECONDS].actual) == (3, None)
    watch.record(step(20, 0.25))
    watch.record(step(21, 0.21))
    found = watch.result()
    assert found is not None and (found.step, found.timed_steps) == (21, 5)
    assert figures(watch)[SECONDS].actual == 0.21


def test_a_step_after_one_in_which_a_jump_was_tried_counts_again():
    watch = watching(card(FakeAllocator(1, 2)))
    for number in range(1, 9):
        watch.record(TRIED)
        watch.record(step(2 * number, 0.9))
        watch.record(step(2 * number + 1, 0.2))
    found = watch.result()
    assert found is not None and (found.timed_steps, figures(watch)[SECONDS].actual) == (5, 0.2)


def test_memory_is_the_highest_of_the_process():
    allocator, host = FakeAllocator(1, 2), [GIB]
    watch = PlanWatch(card(allocator), lambda: host[0])
    watch.planned = PLANNED
    allocator.hold(3, 5)
    host[0] = 3 * GIB
    for number in range(1, 11):
        watch.record(step(number, 0.2))
    assert figures(watch)[GPU].actual == 5 * GIB
    allocator.hold(1, 1)
    host[0] = GIB
    found = figures(watch)
    assert (found[GPU].actual, found[HOST].actual) == (5 * GIB, 3 * GIB)


def test_what_the_system_does_not_say_of_the_host_is_unavailable():
    def nothing() -> int:
        raise FileNotFoundError

    watch = PlanWatch(None, nothing)
    watch.planned = PLANNED
    assert figures(watch)[HOST].missing == "the system does not say"


def test_memory_of_jumps_is_planned_once_one_was_tried():
    watch = watching()
    assert figures(watch)[HOST].planned == GIB
    assert figures(watch, has_windows=True)[HOST].difference is None
    watch.record(TRIED)
    assert figures(watch, has_windows=True)[HOST].planned == 3 * GIB


def test_the_folder_keeps_the_plan_for_the_process_that_resumes_the_run(tmp_path):
    watch = watching()
    watch.keep_in(tmp_path, is_resumed=False)
    assert read_planned(tmp_path) == PLANNED
    later = PlanWatch(None)
    later.keep_in(tmp_path, is_resumed=True)
    assert later.planned == PLANNED
    other = PlanWatch(None)
    other.planned = Planned("another", 1, 1)
    other.keep_in(tmp_path, is_resumed=True)
    assert other.planned == PLANNED == read_planned(tmp_path)  # the one it began with
    later.start(pytest.fail, 30, lambda: False)
    found = later.result()
    assert found is not None and found.from_step == 30


def test_a_damaged_plan_is_said_and_ends_no_run(tmp_path):
    (tmp_path / PLAN).write_text("{")
    watch, said = PlanWatch(None), list[str]()
    watch.keep_in(tmp_path, is_resumed=True)
    watch.start(said.append, 3, lambda: False)
    assert (watch.planned, watch.result()) == (None, None)
    assert said == ["plan.json is damaged: this run is held against no plan at its end"]


def test_at_the_end_it_is_a_record_of_the_log(tmp_path: Path):
    watch = watching(card(FakeAllocator(1, 5)), clock=7)
    with RunLog(tmp_path / "log.jsonl") as log:
        found = watch.finish(log, has_windows=False)
        assert PlanWatch(None).finish(log, has_windows=False) is None
    (record,) = read_log(tmp_path / "log.jsonl")
    assert found is not None and (record["kind"], record["step"], record["from_step"]) == ("plan", 7, 7)
    assert record["figures"][0]["actual"] == 5 * GIB and record["remarks"] == list(found.remarks)
    assert json.dumps(record)
