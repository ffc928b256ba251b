"""Counts of a run, from its records alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hybridtrainer.observe.tally import Statistics, Tally
from hybridtrainer.records import JumpRecord, Phase, PhaseChange, StepResult


def step(clock: int, phase: Phase = Phase.FULL, seconds: float = 1.0, **options: Any) -> StepResult:
    result = StepResult(clock, phase, 2.0, 0, None, seconds, "")
    return replace(result, **options)


def jump(verdict: str, worth: int = 0, seconds: float = 0.0, reason: str = "because") -> JumpRecord:
    return JumpRecord(10, 15, "line_fit", 0.9, verdict, reason, worth_steps=worth, seconds=seconds)


def after(*records: StepResult | JumpRecord | PhaseChange) -> Statistics:
    tally = Tally()
    for record in records:
        tally.observe(record)
    return tally.statistics()


def test_nothing_has_happened_in_a_new_run():
    empty = after()
    assert (empty.steps, empty.real_steps, empty.foreseen_steps, empty.backward_reduction) == (0, 0, 0, 0.0)
    assert empty.estimated_speedup is None
    assert set(empty.seconds_by_phase) == {"warmup", "full", "predict", "correct"}


def test_real_steps_and_seconds_are_counted_by_phase():
    found = after(step(1, Phase.WARMUP, 2.0), step(2, Phase.FULL, 1.0), step(3, Phase.CORRECT, 3.0, skipped=True))
    assert (found.steps, found.real_steps, found.skipped_updates) == (3, 3, 1)
    assert found.seconds_by_phase == {"warmup": 2.0, "full": 1.0, "predict": 0.0, "correct": 3.0}
    assert found.seconds == 6.0
    assert found.backward_reduction == 0.0
    assert found.estimated_speedup == pytest.approx(1.0)


def test_an_accepted_jump_saves_what_it_is_worth():
    found = after(
        *(step(i) for i in range(1, 7)),
        jump("accepted", worth=4, seconds=0.5),
        step(10, Phase.PREDICT, 0.6, predicted=4),
        jump("kept", worth=4),
    )
    assert (found.steps, found.real_steps, found.foreseen_steps) == (10, 6, 4)
    assert (found.jumps_accepted, found.jumps_kept, found.jumps_refused, found.jumps_rolled_back) == (1, 1, 0, 0)
    assert found.backward_reduction == pytest.approx(0.4)
    assert found.seconds_by_phase["predict"] == pytest.approx(0.6)  # the call, of which the jump is a part
    assert found.seconds == pytest.approx(6.6)
    assert found.estimated_speedup == pytest.approx(10 * 1.0 / 6.6)


def test_a_refused_jump_costs_time_in_predict_and_not_in_the_step_after_it():
    found = after(step(1), jump("refused", seconds=0.5), step(2, Phase.FULL, 1.5))
    assert found.seconds_by_phase["predict"] == pytest.approx(0.5)
    assert found.seconds_by_phase["full"] == pytest.approx(2.0)
    assert found.estimated_speedup == pytest.approx(2 * 1.0 / 2.5)
    assert (found.foreseen_steps, found.jumps_refused) == (0, 1)


def test_a_jump_rolled_back_takes_its_worth_with_it_and_leaves_the_real_steps():
    found = after(
        *(step(i) for i in range(1, 5)),
        jump("accepted", worth=6),
        step(10, Phase.PREDICT, predicted=6),
        step(11, Phase.CORRECT),
        jump("rolled back", worth=6, reason="rolled back 7 steps: loss 9.1 is 8.0 sigma above 2.0"),
        step(4, Phase.CORRECT),
    )
    assert (found.steps, found.real_steps, found.foreseen_steps) == (4, 6, 0)
    assert found.backward_reduction == pytest.approx(-0.5)
    assert found.jumps_rolled_back == 1


def test_reasons_are_counted_without_their_figures():
    tally = Tally()
    for chance in ("0.20", "0.31", "0.07"):
        tally.observe(jump("refused", reason=f"better with a chance of {chance}, below 0.85"))
    tally.observe(jump("refused", reason="the optimizer keeps no moments"))
    tally.observe(jump("accepted", reason="worth 3 of 15 steps"))
    tally.count_declined("confidence 0.31 is below 0.85")
    tally.count_declined("confidence 0.44 is below 0.85")
    found = tally.statistics()
    assert found.refusals == {"better with a chance of # below #": 3, "the optimizer keeps no moments": 1}
    assert found.declined == {"confidence # is below #": 2}


def test_a_phase_change_counts_nothing():
    assert after(PhaseChange(1, Phase.WARMUP, Phase.FULL, "done")) == after()


def full_tally() -> Tally:
    tally = Tally()
    for record in (step(1), jump("refused", seconds=0.5), step(2, skipped=True), jump("accepted", 3, 0.25)):
        tally.observe(record)
    tally.count_declined("confidence 0.31 is below 0.85")
    return tally


def test_a_tally_survives_json_and_goes_on_alike():
    ours, theirs = full_tally(), Tally()
    theirs.restore(json.loads(json.dumps(ours.to_dict())))
    assert theirs.statistics() == ours.statistics()
    for tally in (ours, theirs):
        tally.observe(step(5, Phase.PREDICT, 0.5, predicted=3))
        tally.observe(jump("refused", reason="because"))
        tally.count_declined("new")
    assert theirs.statistics() == ours.statistics()
    assert theirs.to_dict() == ours.to_dict()


def test_what_was_saved_does_not_change_with_the_tally():
    tally = full_tally()
    saved = tally.to_dict()
    kept = json.dumps(saved)
    tally.observe(step(3))
    assert json.dumps(saved) == kept
    other = Tally()
    other.restore(saved)
    other.observe(step(3))
    other.count_declined("new")
    assert json.dumps(saved) == kept


def test_statistics_are_plain_values():
    found = full_tally().statistics()
    assert Statistics(**json.loads(json.dumps(found.to_dict()))) == found


def test_samples_are_added_up():
    found = after(step(1, forward_samples=16, backward_samples=16), step(2, forward_samples=48, backward_samples=16))
    assert (found.forward_samples, found.backward_samples) == (64, 32)


def test_what_each_kind_of_foresight_was_worth():
    tally = Tally()
    for clock in range(1, 5):
        tally.observe(step(clock, seconds=1.0, backward_samples=8))
    tally.count_growth()  # four steps of a short model
    for clock in range(5, 7):
        tally.observe(step(clock, seconds=3.0, backward_samples=8))
    assert tally.statistics().worth_seconds == {"depth": pytest.approx(4 * 3.0 - 4 * 1.0)}
    assert tally.statistics(left_out=24).worth_seconds["samples"] == pytest.approx(24 * 10.0 / 48)
    tally.observe(jump("accepted", worth=3, seconds=2.0))
    tally.observe(step(9, Phase.PREDICT, 2.0, predicted=3))
    assert tally.statistics().worth_seconds["jumps"] == pytest.approx(3 * 10.0 / 6 - 2.0)


def test_what_was_not_used_was_worth_nothing():
    assert after(step(1), step(2)).worth_seconds == {}
    tally = Tally()
    tally.count_growth()
    tally.observe(step(1))
    assert tally.statistics(left_out=0).worth_seconds == {}
