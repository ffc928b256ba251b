"""What a person sees while a run goes on: a live bar in a terminal, plain lines everywhere else, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from hybridtrainer.records import JumpRecord, PhaseChange, StepResult

LINE_SECONDS = 10.0


class Progress(Protocol):
    """Receives every record of a run and now and then a message."""

    def start(self, step: int, steps: int) -> None:
        """The run goes from `step` to `steps`."""

    def record(self, record: StepResult | JumpRecord | PhaseChange) -> None:
        """Something happened."""

    def message(self, text: str) -> None:
        """Something to be read at once."""

    def stop(self) -> None:
        """The run is over."""


def make_progress(mode: str = "auto", name: str = "training") -> Progress:
    """The display for `mode`: "auto" looks whether standard error is a terminal; "bar", "lines", "off" do not."""
    if mode == "off":
        return Silence()
    if mode == "bar" or (mode == "auto" and sys.stderr.isatty()):
        return Bar(name)
    return Lines(name)


class Silence:
    """Shows nothing."""

    def start(self, step: int, steps: int) -> None:
        """Nothing."""

    def record(self, record: StepResult | JumpRecord | PhaseChange) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class Lines:
    """A line every few seconds, for log files and notebooks."""

    def __init__(self, name: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._stream = stream
        self._clock = clock
        self._steps = self._began_at = 0
        self._began = self._shown = 0.0

    def start(self, step: int, steps: int) -> None:
        """The run begins at `step` and ends at `steps`."""
        self._began_at, self._steps = step, steps
        self._began = self._shown = self._clock()

    def record(self, record: StepResult | JumpRecord | PhaseChange) -> None:
        """Prints a line if the last one is long enough ago, and at the end."""
        if not isinstance(record, StepResult):
            return
        now = self._clock()
        if now - self._shown < LINE_SECONDS and record.step < self._steps:
            return
        self._shown = now
        done = max(1, record.step - self._began_at)
        left = (now - self._began) / done * (self._steps - record.step)
        self.message(
            f"step {record.step}/{self._steps}  {record.phase:7}  loss {record.loss:.4f}  {_duration(left)} left"
        )

    def message(self, text: str) -> None:
        """Prints a line at once."""
        print(f"{self._name}: {text}", file=self._stream or sys.stderr, flush=True)

    def stop(self) -> None:
        """Nothing to clean up."""


class Bar:
    """A live bar with phase, loss and time left."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[phase]:7}  loss {task.fields[loss]}  jumps {task.fields[jumps]}"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task(name, total=1, phase="", loss="-", jumps=0)
        self._kept = 0

    def start(self, step: int, steps: int) -> None:
        """Shows the bar."""
        self._bar.update(self._task, completed=step, total=steps)
        self._bar.start()

    def record(self, record: StepResult | JumpRecord | PhaseChange) -> None:
        """Moves the bar."""
        if isinstance(record, JumpRecord):
            self._kept += record.verdict == "kept"
        elif isinstance(record, StepResult):
            loss = f"{record.loss:.4f}"
            self._bar.update(self._task, completed=record.step, phase=str(record.phase), loss=loss, jumps=self._kept)

    def message(self, text: str) -> None:
        """Prints above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, emoji=False)

    def stop(self) -> None:
        """Leaves the bar as it is."""
        self._bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
