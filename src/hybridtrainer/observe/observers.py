"""Everyone who hears of a step of `fit`: the log, the display, and those who find out more for the two of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybridtrainer.errors import RunFolderError
from hybridtrainer.memory.pressure import Pressure
from hybridtrainer.observe.lookout import Lookout
from hybridtrainer.observe.memory import MemoryWatch
from hybridtrainer.observe.progress import Progress
from hybridtrainer.observe.runlog import RunLog, read_log
from hybridtrainer.records import Event, Record


def observers(
    progress: Progress,
    log: RunLog | None,
    steps: int,
    clock: int,
    past: Path | None,
    pressure: Pressure | None = None,
    copies: Callable[[], int] = lambda: 0,
) -> list[Callable[[Record], None]]:
    """Listeners for a trainer. Forecasts and memory go to the log and to the display, behind the step they belong to.

    Args:
        progress: The display.
        log: The log, where there is one.
        steps: Where the clock ends.
        clock: Where the clock stands.
        past: For a resumed run its log, from which the forecasts go on.
        pressure: Of the GPU's memory, where there is a GPU.
        copies: How often all weights have been copied.
    """

    def tell(event: Event) -> None:
        if log is not None:
            log.record(event)
        progress.record(event)

    lookout = Lookout(steps, tell, clock)
    if past is not None:
        try:
            lookout.replay(read_log(past))
        except RunFolderError as error:  # forecasts are not worth a run: they begin anew
            progress.message(f"forecasts begin anew: {error}")
    first: list[Callable[[Record], None]] = [] if log is None else [log.record]
    return [*first, progress.record, lookout.record, MemoryWatch(pressure, tell, clock, copies).record]
