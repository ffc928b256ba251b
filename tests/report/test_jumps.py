"""Jumps as attempts, from forecast to final verdict."""

from __future__ import annotations

from tests.report.making import records

from hybridtrainer.report.jumps import attempts, counted_reasons


def jump(step, verdict, **more):
    return {"kind": "jump", "step": step, "verdict": verdict, "reason": f"{verdict} 1.5", **more}


def test_accepting_and_settling_a_jump_is_one_attempt_with_the_losses_of_the_probe():
    found = attempts([
        jump(10, "accepted", probe_before=2.0, probe_after=1.9, worth_steps=3),
        jump(10, "kept", probe_before=2.0, probe_after=1.5, worth_steps=3),
    ])  # fmt: skip
    (only,) = found
    assert only.verdict == "kept" and only.probe_after == 1.9 and only.worth_steps == 3
    assert only.reason == "accepted 1.5; kept 1.5"
    assert only.probe_change is not None and abs(only.probe_change + 0.1) < 1e-9


def test_a_jump_under_correction_stays_open_and_settling_another_does_not_touch_it():
    found = attempts([jump(10, "accepted"), jump(20, "rolled back"), jump(30, "refused")])
    assert [attempt.verdict for attempt in found] == ["accepted", "rolled back", "refused"]
    assert found[0].probe_change is None


def test_alike_reasons_are_counted_together():
    found = attempts(records())
    counted = counted_reasons(found)
    assert sum(times for *_, times in counted) == len(found)
    assert ("refused", "probe loss # worth # of # steps") in [(verdict, reason) for verdict, reason, _ in counted]


def test_records_with_strange_values_do_not_break_anything():
    (only,) = attempts([{"kind": "jump", "step": None, "verdict": 3, "confidence": "nan", "horizon_steps": "x"}])
    assert only.step == 0.0 and only.verdict == "3" and only.confidence is None and only.horizon_steps is None
