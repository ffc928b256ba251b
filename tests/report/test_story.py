"""The records of a log gone through one by one."""

from __future__ import annotations

import pytest
from tests.report.making import records

from hybridtrainer.observe.tally import Tally
from hybridtrainer.records import JumpRecord, Phase, StepResult
from hybridtrainer.report.story import Story, Stretch


def told(found):
    story = Story()
    for record in found:
        story.take(record)
    return story


def step(number, phase="full", loss=1.0, seconds=1.0, predicted=0):
    return {"kind": "step", "step": number, "phase": phase, "loss": loss, "seconds": seconds, "predicted": predicted}


def test_counts_and_times_equal_those_of_the_trainers_own_tally():
    tally, found = Tally(), records(400)
    for record in found:
        fields = {key: value for key, value in record.items() if key not in ("v", "kind")}
        if record["kind"] == "step":
            tally.observe(StepResult(**{**fields, "phase": Phase(fields["phase"])}))
        elif record["kind"] == "jump":
            tally.observe(JumpRecord(**fields))
    known, story = tally.statistics(), told(found)
    assert (story.real_steps, story.foreseen, story.clock) == (known.real_steps, known.foreseen_steps, known.steps)
    for phase, seconds in known.seconds_by_phase.items():
        assert story.seconds[phase] == pytest.approx(seconds)


def test_a_roll_back_is_in_the_curve_over_time_and_not_in_that_over_steps():
    story = told([step(1), step(5, "predict", predicted=4), step(6, "correct", loss=9.0), step(2, loss=1.0)])
    assert [x for x, _ in story.by_time().loss] == [1.0, 3.0, 4.0]
    assert [x for x, _ in story.by_step().loss] == [1, 2]
    assert story.by_step().phases == [Stretch(0.0, 2.0, "full")]


def test_the_probe_loss_after_a_jump_is_no_training_loss():
    story = told([step(1), step(5, "predict", loss=99.0, predicted=4)])
    assert [y for _, y in story.by_step().loss] == [1.0]


def test_neighbours_of_one_phase_are_one_stretch():
    story = told([step(1, "warmup"), step(2, "warmup"), step(3), step(4)])
    assert story.by_time().phases == [Stretch(0.0, 2.0, "warmup"), Stretch(2.0, 4.0, "full")]


def test_values_that_are_no_numbers_are_gaps():
    story = told([step(1), step(2, loss="nan"), step(3, loss=None), step(4, seconds=None, phase=["x"]), step(None)])
    assert [y is None for _, y in story.by_time().loss] == [False, True, True, False, False]
    assert story.by_time().phases[-2:] == [Stretch(3.0, 3.0, "other"), Stretch(3.0, 4.0, "full")]


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ({"kind": "end", "status": "paused"}, "paused"),
        ({"kind": "error", "step": 1, "error": "ValueError: no"}, "error"),
        ({"kind": "resume", "continues_at": 0}, "unfinished"),
        ({"kind": "what is this"}, "unfinished"),
    ],
)
def test_the_status_is_what_the_log_says_last(last, status):
    assert told([step(1), last]).status == status


def test_the_training_time_is_that_of_the_last_record_that_has_it_and_of_the_steps_after_it():
    assert told([step(1)]).trained is None
    measured = {"kind": "evaluation", "step": 1, "seconds": 9.0, "training_seconds": 1.5, "loss": 1.0}
    assert told([step(1), measured]).trained == 1.5
    assert told([step(1), measured, step(2)]).trained == 2.5
    end = {"kind": "end", "step": 2, "status": "finished", "seconds": 20.0, "training_seconds": 2.75}
    assert told([step(1), measured, step(2), end]).trained == 2.75
    assert told([step(1), measured, {"kind": "end", "status": "finished"}]).trained == 1.5


def test_of_several_plans_held_against_a_run_the_newest_counts():
    assert told([step(1)]).plan is None
    found = told([{"kind": "plan", "step": 1}, step(2), {"kind": "plan", "step": 2}]).plan
    assert found == {"kind": "plan", "step": 2}
