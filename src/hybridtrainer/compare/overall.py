"""The progress of many runs as the progress of one: their clocks added up."""

from __future__ import annotations

from dataclasses import replace

from hybridtrainer.observe.progress import Progress
from hybridtrainer.records import Event, StepResult


class Overall:
    """Adds up the clocks of its parts and shows the sum."""

    def __init__(self, shown: Progress) -> None:
        self.shown = shown
        self.clocks: dict[Part, int] = {}

    def part(self) -> Part:
        """The display for one of the runs."""
        return Part(self)

    def start(self, steps: int) -> None:
        """A stretch of work begins that will make so many steps in all."""
        self.clocks = {}
        self.shown.start(0, steps)


class Part:
    """What one run tells; what it says in words is left out."""

    def __init__(self, overall: Overall) -> None:
        self._overall = overall

    def start(self, step: int, steps: int) -> None:
        """The run is at `step`."""
        self._overall.clocks[self] = min(step, steps)

    def record(self, record: Event) -> None:
        """Shows a step as one of all steps."""
        if isinstance(record, StepResult):
            self._overall.clocks[self] = record.step
            self._overall.shown.record(replace(record, step=sum(self._overall.clocks.values())))

    def message(self, text: str) -> None:
        """Not shown."""

    def stop(self) -> None:
        """The others may still be on their way."""
