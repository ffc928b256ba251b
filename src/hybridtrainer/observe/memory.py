"""How much memory a run takes: the process's own, and that of its GPU. Tells of it; what to do is in `pressure.py`.

torch's peak is kept for the whole process, and a reset would falsify what others measure with it. So the peak told
here is the highest so far: what decides whether a run fits.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil

from hybridtrainer.memory.pressure import Pressure
from hybridtrainer.records import MemoryUse, Phase, PhaseChange, Record, StepResult

INTERVAL_STEPS = 10


def host_bytes(process: psutil.Process | None = None) -> int | None:
    """Resident memory of this process; None where the system does not say.

    Args:
        process: This process, where the caller has looked it up already: that takes longer than the question.
    """
    try:
        return int((process or psutil.Process()).memory_info().rss) or None
    except (psutil.Error, OSError):
        return None


class MemoryWatch:
    """Tells the memory in use after every tenth step of the clock, and after a step in which the phase changed.

    Args:
        pressure: Of the GPU, told of every step; None where there is none.
        tell: Called with what was found.
        clock: Where it stands.
        copies: How often all weights have been copied.
    """

    def __init__(
        self,
        pressure: Pressure | None,
        tell: Callable[[MemoryUse], None],
        clock: int = 0,
        copies: Callable[[], int] = lambda: 0,
    ) -> None:
        self._pressure = pressure
        self._tell = tell
        self._clock = clock
        self._copies = copies
        self._entered: Phase | None = None

    def record(self, record: Record) -> None:
        """Takes in a step or a phase change."""
        if isinstance(record, PhaseChange):
            self._entered = record.after
        elif isinstance(record, StepResult):
            use = self._pressure.after_step(record.step) if self._pressure is not None else None
            before, self._clock = self._clock, record.step
            if self._entered is None and before // INTERVAL_STEPS == record.step // INTERVAL_STEPS:
                return
            self._tell(
                MemoryUse(
                    record.step,
                    record.phase,
                    host_bytes(),
                    device_bytes=use.allocated_bytes if use else None,
                    device_peak_bytes=use.highest_reserved_bytes if use else None,
                    device_reserved_bytes=use.reserved_bytes if use else None,
                    card_bytes=use.card_bytes if use else None,
                    weight_copies=self._copies(),
                    entered=self._entered,
                )
            )
            self._entered = None
