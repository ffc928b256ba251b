"""Who hears of a step, of what, and when."""

from __future__ import annotations

from typing import Any

import pytest

from hybridtrainer.hooks import Hooks
from hybridtrainer.observe.chronicle import Chronicle
from hybridtrainer.records import JumpRecord, Notice, Phase, PhaseChange, StepResult

RESULT = StepResult(1, Phase.FULL, 2.0, 0, None, 0.5, "", forward_samples=6, backward_samples=4)
JUMP = JumpRecord(0, 5, "line_fit", 0.9, "refused", "too short")
CHANGE = PhaseChange(0, Phase.PREDICT, Phase.FULL, "refused")


class Hook:
    def __init__(self, heard: list[Any]) -> None:
        self.heard = heard

    def after_jump(self, trainer: Any, record: JumpRecord) -> None:
        self.heard.append(("hook", trainer, record))

    def on_phase_change(self, trainer: Any, change: PhaseChange) -> None:
        self.heard.append(("hook", trainer, change))


def test_listeners_hear_before_hooks_and_in_the_order_of_events():
    heard: list[Any] = []
    chronicle = Chronicle(Hooks([Hook(heard)]))
    chronicle.listeners.append(heard.append)
    chronicle.note(JUMP)
    chronicle.note(CHANGE)
    assert heard == []
    chronicle.tell(RESULT, "the trainer")
    assert heard == [JUMP, CHANGE, RESULT, ("hook", "the trainer", JUMP), ("hook", "the trainer", CHANGE)]
    assert chronicle.tally.statistics().jumps_refused == 1


def test_nobody_hears_of_a_step_that_was_undone():
    heard: list[Any] = []
    chronicle = Chronicle(Hooks())
    chronicle.listeners.append(heard.append)
    chronicle.note(JUMP)
    chronicle.forget()
    chronicle.tell(RESULT, None)
    assert heard == [RESULT]


def test_a_listener_that_raises_does_not_make_the_next_step_tell_it_again():
    chronicle = Chronicle(Hooks())
    heard: list[Any] = []

    def raises_once(record: Any) -> None:
        heard.append(record)
        if len(heard) == 1:
            raise OSError("full")

    chronicle.listeners.append(raises_once)
    chronicle.note(JUMP)
    with pytest.raises(OSError, match="full"):
        chronicle.tell(RESULT, None)
    chronicle.tell(RESULT, None)
    assert heard == [JUMP, RESULT]
    assert chronicle.tally.statistics().forward_samples == 12


def test_hooks_are_not_called_for_a_notice():
    heard: list[Any] = []
    chronicle = Chronicle(Hooks([Hook(heard)]))
    chronicle.listeners.append(heard.append)
    notice = Notice(3, "batches are divided")
    chronicle.note(notice)
    chronicle.tell(RESULT, "the trainer")
    assert heard == [notice, RESULT]
