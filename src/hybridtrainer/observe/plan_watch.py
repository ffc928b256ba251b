"""Measures what a run takes, so that it can be held against its plan, and keeps the plan in the run's folder."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hybridtrainer.memory.vram import Vram
from hybridtrainer.observe.against_plan import LEAST_STEPS, Actual, JumpMemory, against_plan
from hybridtrainer.observe.own_host import own_host_bytes
from hybridtrainer.observe.plan_file import PLAN, read_planned, write_planned
from hybridtrainer.observe.runlog import RunLog
from hybridtrainer.records import JumpRecord, Planned, PlanResult, Record, StepResult

FIRST_STEPS = 3  # of a process: kernels are chosen and memory is taken in them
MOST_STEPS = 1000  # the newest count; a median of more would be the same
HOST_INTERVAL = 10  # steps; to ask takes as long as a launch or two


class PlanWatch:
    """Of one run in one process.

    Args:
        vram: Memory of the GPU, where there is one.
        host_bytes: Says what the process has of host memory.

    Attributes:
        planned: What the run is held against; None where it was not planned.
    """

    def __init__(self, vram: Vram | None, host_bytes: Callable[[], int] = own_host_bytes) -> None:
        self.planned: Planned | None = None
        self._vram, self._host_bytes = vram, host_bytes
        self._seconds: deque[float] = deque(maxlen=MOST_STEPS)
        self._most_host, self._clock, self._from = 0, 0, 0
        self._steps = self._timed = 0
        self._is_short: Callable[[], bool] = lambda: False
        self._jumped = self._tried = False
        self._fault = ""

    def keep_in(self, folder: Path, is_resumed: bool) -> None:
        """Keeps the plan in a run's folder; of a run that goes on it is the one with which it began.

        Raises:
            RunFolderError: if it cannot be written.
        """
        if self.planned is not None and not is_resumed:
            write_planned(folder, self.planned)
        elif (folder / PLAN).exists():
            self.planned = read_planned(folder)
            self._fault = "" if self.planned else f"{PLAN} is damaged: this run is held against no plan at its end"

    def start(self, say: Callable[[str], None], clock: int, is_short: Callable[[], bool]) -> None:
        """Begins.

        Args:
            say: Called with what a person should know.
            clock: Where the run's clock stands.
            is_short: Says whether the model has yet to grow: plans are of the whole one.
        """
        self._clock = self._from = clock
        self._is_short = is_short
        if self._fault:
            say(self._fault)

    def record(self, record: Record) -> None:
        """Takes in a step. Jumps, and the steps in which one was tried, are not what a plan has seconds of."""
        if isinstance(record, JumpRecord):
            self._tried = True
            self._jumped = self._jumped or record.seconds > 0
        elif isinstance(record, StepResult):
            self._clock, jumped, self._jumped = record.step, self._jumped, False
            self._steps += 1
            if self._steps % HOST_INTERVAL == 0:
                self._look_at_host()
            if record.predicted or record.skipped or jumped or self._is_short():
                return
            self._timed += 1
            if self._timed > FIRST_STEPS:
                self._seconds.append(record.seconds)

    def result(self, has_windows: bool = False) -> PlanResult | None:
        """The plan beside what was measured; None where there is no plan.

        Args:
            has_windows: Whether windows for jumps were kept in host memory.
        """
        if self.planned is None:
            return None
        self._look_at_host()
        seconds = statistics.median(self._seconds) if len(self._seconds) >= LEAST_STEPS else None
        reserved = None if self._vram is None else self._vram.read().highest_reserved_bytes or None
        jumps: JumpMemory = "all" if self._tried else "windows" if has_windows else "nothing"
        actual = Actual(self._clock, self._from, reserved, self._most_host or None, seconds, len(self._seconds), jumps)
        return against_plan(self.planned, actual)

    def finish(self, log: RunLog | None, has_windows: bool) -> PlanResult | None:
        """The same at the end of a run, written into its log."""
        found = self.result(has_windows)
        if log is not None and found is not None:
            log.record(found)
        return found

    def _look_at_host(self) -> None:
        try:
            self._most_host = max(self._most_host, self._host_bytes())
        except OSError:  # no /proc: it stays unknown
            return
