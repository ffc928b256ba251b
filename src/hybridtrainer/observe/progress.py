"""What a person sees while a run goes on: a live bar, a line that is rewritten, plain lines, or nothing.

What there is to say is in `status.py`; here it is only shown, in a terminal, a notebook or a log file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from hybridtrainer.errors import ModelError
from hybridtrainer.observe.status import Status
from hybridtrainer.records import Event, StepResult

if TYPE_CHECKING:
    from rich.console import Console

MODES = ("auto", "bar", "lines", "notebook", "off")
LINE_SECONDS = 10.0
REFRESH_SECONDS = 0.5
LEAST_BAR_WIDTH = 4
NOTEBOOK_WIDTH = 100


class Progress(Protocol):
    """Receives everything that happens in a run, and now and then a message."""

    def start(self, step: int, steps: int) -> None:
        """The run goes from `step` to `steps`."""

    def record(self, record: Event) -> None:
        """Something happened."""

    def message(self, text: str) -> None:
        """Something to be read at once."""

    def stop(self) -> None:
        """The run is over."""


def make_progress(mode: str = "auto", name: str = "training") -> Progress:
    """The display for `mode`; "auto" looks where it is: in a notebook, in a terminal, or in neither.

    Raises:
        ModelError: if there is no such mode.
    """
    if mode not in MODES:
        raise ModelError(f"There is no progress display {mode!r}.", f"Choose from {', '.join(MODES)}.")
    if mode == "off":
        return Silence()
    if mode == "notebook" or (mode == "auto" and in_notebook()):
        return NotebookLine(name)
    if mode == "bar" or (mode == "auto" and sys.stderr.isatty()):
        return Bar(name)
    return Lines(name)


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel. Imports nothing: a kernel has all of it loaded."""
    shell = sys.modules.get("IPython")
    if shell is None or "ipykernel" not in sys.modules:
        return False
    return getattr(shell.get_ipython(), "kernel", None) is not None


class Unbreakable:
    """A display whose stream may be closed by whoever reads it: then it falls silent, and the run goes on."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown

    def start(self, step: int, steps: int) -> None:
        """Passed on."""
        self._try(lambda: self._shown.start(step, steps))

    def record(self, record: Event) -> None:
        """Passed on."""
        self._try(lambda: self._shown.record(record))

    def message(self, text: str) -> None:
        """Passed on."""
        self._try(lambda: self._shown.message(text))

    def stop(self) -> None:
        """Passed on."""
        self._try(self._shown.stop)

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except (OSError, ValueError):  # a broken pipe, a full disk, a closed file
            self._shown = Silence()


class Silence:
    """Shows nothing."""

    def start(self, step: int, steps: int) -> None:
        """Nothing."""

    def record(self, record: Event) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class Lines:
    """A line every few seconds, for log files."""

    seconds = LINE_SECONDS

    def __init__(self, name: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._stream = stream
        self._clock = clock
        self._status = Status(clock)
        self._shown = 0.0

    def start(self, step: int, steps: int) -> None:
        """The run begins at `step` and ends at `steps`."""
        self._status.start(step, steps)
        self._shown = self._clock()

    def record(self, record: Event) -> None:
        """Shows where the run is if the last time is long enough ago, and at the end."""
        self._status.update(record)
        if not isinstance(record, StepResult):
            return
        now = self._clock()
        if now - self._shown >= self.seconds or record.step >= self._status.steps:
            self._shown = now
            self._show()

    def message(self, text: str) -> None:
        """Prints a line at once."""
        print(f"{self._name}: {text}", file=self._stream or sys.stderr, flush=True)

    def stop(self) -> None:
        """Nothing to clean up."""

    def _show(self) -> None:
        self.message(f"step {self._status.count()}  {self._status.facts()}")


class NotebookLine(Lines):
    """One line that is rewritten in place, without widgets; messages have lines of their own."""

    seconds = REFRESH_SECONDS

    def __init__(self, name: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name, stream, clock)
        self._written = 0

    def _show(self) -> None:
        self._rewrite(self._line())

    def message(self, text: str) -> None:
        """Prints in place of the line, which then goes on below."""
        line = self._line() if self._written else ""
        self._rewrite(f"{self._name}: {text}")
        self._end_line()
        if line:
            self._rewrite(line)

    def stop(self) -> None:
        """Leaves the line as it is."""
        if self._written:
            self._rewrite(self._line())
            self._end_line()

    def _line(self) -> str:
        head = f"{self._name}: {self._status.count()}  "
        return head + self._status.facts(NOTEBOOK_WIDTH - len(head))

    def _rewrite(self, text: str) -> None:
        # What a longer line before left behind is overwritten with blanks: not every front end can erase a line.
        print(f"\r{text.ljust(self._written)}", end="", file=self._stream or sys.stdout, flush=True)
        self._written = len(text)

    def _end_line(self) -> None:
        print(file=self._stream or sys.stdout, flush=True)
        self._written = 0


class Bar:
    """A live bar that fits the terminal: with phase, loss, final loss, memory and time left as far as there is room.

    Args:
        name: Of the run.
        console: Where to show it; standard error where left out.
        clock: Seconds.
    """

    def __init__(self, name: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._name = name
        self._clock = clock
        self._status = Status(clock)
        self._shown = 0.0
        columns = [
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=LEAST_BAR_WIDTH)),
            TextColumn("{task.fields[facts]}", markup=False, table_column=Column(no_wrap=True, overflow="crop")),
        ]
        # It is drawn by `record`, not by a thread that would compete with the training for the interpreter.
        self._bar = RichProgress(*columns, console=console or Console(stderr=True), auto_refresh=False, expand=True)
        self._task = self._bar.add_task(name, total=1, facts="")

    def start(self, step: int, steps: int) -> None:
        """Shows the bar."""
        self._status.start(step, steps)
        self._draw()
        self._bar.start()

    def record(self, record: Event) -> None:
        """Moves the bar, twice a second at most."""
        self._status.update(record)
        if isinstance(record, StepResult) and self._clock() - self._shown >= REFRESH_SECONDS:
            self._draw()
            self._bar.refresh()

    def message(self, text: str) -> None:
        """Prints above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, emoji=False)

    def stop(self) -> None:
        """Leaves the bar as it is at the end."""
        self._draw()
        self._bar.stop()

    def _draw(self) -> None:
        self._shown = self._clock()
        status, head = self._status, f"{self._status.count()} "
        room = self._bar.console.width - len(self._name) - LEAST_BAR_WIDTH - 2 - len(head)
        self._bar.update(self._task, completed=status.step, total=status.steps, facts=head + status.facts(room))
