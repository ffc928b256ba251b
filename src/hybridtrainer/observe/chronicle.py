"""Tells of what happened in a step once the step is complete: first the tally, then listeners, then hooks.

Whoever raises while being told cannot leave a step half done, and of a step that was undone nobody hears.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hybridtrainer.hooks import Hooks
from hybridtrainer.observe.tally import Tally
from hybridtrainer.records import JumpRecord, LossForecast, Notice, PhaseChange, PrecisionChange, Record, StepResult

Note = PhaseChange | JumpRecord | PrecisionChange | LossForecast | Notice
"""What happens within a step."""
EVENTS: dict[type, str] = {PhaseChange: "on_phase_change", JumpRecord: "after_jump"}
"""What hooks are called with which record; of others they hear by other events, or in the log."""

Noted = TypeVar("Noted", PhaseChange, JumpRecord, PrecisionChange, LossForecast, Notice)


class Chronicle:
    """The events of the step in progress, and those who will hear of them.

    Attributes:
        tally: The counts of the run.
        listeners: Called with every record.
    """

    def __init__(self, hooks: Hooks) -> None:
        self.tally = Tally()
        self.listeners: list[Callable[[Record], None]] = []
        self._hooks = hooks
        self._noted: list[Note] = []

    def note(self, record: Noted) -> Noted:
        """Takes down what will be told when the step is complete."""
        self._noted.append(record)
        return record

    def forget(self) -> None:
        """The step in progress has been undone."""
        self._noted = []

    def tell(self, result: StepResult, source: Any) -> None:
        """The step is complete: everyone hears of what was noted and of the result."""
        noted, self._noted = self._noted, []
        for observer in (self.tally.observe, *self.listeners):
            for record in (*noted, result):
                observer(record)
        for event in noted:
            if type(event) in EVENTS:
                self._hooks.emit(EVENTS[type(event)], source, event)
