"""The trainer's own state as plain values."""

from __future__ import annotations

import json
from dataclasses import replace

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.phases import divergence, policy
from hybridtrainer.records import JumpRecord
from hybridtrainer.standing import Standing


def some_standing() -> Standing:
    jump = JumpRecord(40, 15, "line_fit", 0.9, "accepted", "probe", worth_steps=7, probe_before=2.0, seconds=1.5)
    watch = divergence.Watch((2.0, 1.9), (0.5, 0.4), suspects=1, bad=2)
    state = policy.after_accepted(policy.start(HybridTrainerConfig()), 15, 7, 1.2)
    data = {"position": {"epoch": 1, "batch": 3}, "identity": {"samples": 9}}
    return Standing(state, watch, 47, 0.8, jump, [1.8], data)


def test_everything_comes_back_through_json_but_seconds():
    standing = some_standing()
    again = Standing.from_tree(json.loads(json.dumps(standing.to_tree())))
    assert again.jump is not None and again.jump.seconds == 0.0
    assert standing.jump is not None
    assert again == Standing(**{**vars(standing), "jump": again.jump})
    assert again.to_tree() == standing.to_tree()


def test_equal_runs_of_different_speed_have_equal_states():
    slow, fast = some_standing(), some_standing()
    assert slow.jump is not None
    slow.jump = replace(slow.jump, seconds=99.0)
    assert slow.to_tree() == fast.to_tree()


def test_undoing_keeps_the_phase_machine_and_restores_the_rest():
    standing = some_standing()
    before = standing.to_undo()
    standing.clock, standing.data = 60, None
    standing.watch = divergence.Watch()
    standing.policy = policy.after_correction_step(standing.policy)
    standing.undo(json.loads(json.dumps(before)))
    assert standing.to_undo() == before
    assert standing.policy.steps_in_phase == 1


def test_a_copy_of_the_state_does_not_share_its_lists():
    standing = some_standing()
    tree = standing.to_tree()
    standing.correction_losses.append(9.9)
    assert tree["correction_losses"] == [1.8]
