"""What a run is held against: the figures of its plan that can be measured, and why seconds are not among them."""

from __future__ import annotations

from dataclasses import replace

from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.hardware import H200
from hybridtrainer.planning.planned import planned_of

ESTIMATE = Estimate({"weights": 100, "states": 200}, {"process": 50}, 7, 0.5, 0.4, None, 30, 0, waits_for_host=True)


def test_on_a_gpu_both_memories_and_seconds_are_kept_apart():
    found = planned_of(ESTIMATE, H200, on_gpu=True, text="planned: so")
    assert (found.text, found.gpu_bytes, found.host_bytes, found.jump_host_bytes) == ("planned: so", 300, 50, 30)
    assert (found.seconds, found.why_no_seconds, found.waits_for_host, found.speeds) == (0.5, "", True, H200.origin)


def test_on_a_cpu_all_of_it_is_in_host_memory():
    found = planned_of(replace(ESTIMATE, seconds=None), None, on_gpu=False)
    assert (found.gpu_bytes, found.host_bytes, found.seconds) == (None, 350, None)
    assert found.why_no_seconds == "plans have seconds for GPUs only"


def test_seconds_that_are_not_planned_have_a_reason():
    without = replace(ESTIMATE, seconds=None)
    assert "doctor --calibrate" in planned_of(without, None, on_gpu=True).why_no_seconds
    assert "32 bits" in planned_of(without, H200, on_gpu=True).why_no_seconds
