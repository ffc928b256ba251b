"""The facts about a run that a display shows, and the words for them. Knows nothing of terminals."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from hybridtrainer.records import Event, JumpRecord, LossForecast, MemoryUse, StepResult

PACE_RECORDS = 50


class Status:
    """The newest of everything.

    Args:
        clock: Seconds, for the pace.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step = self.steps = self.kept_jumps = 0
        self.last: StepResult | None = None
        self.final: LossForecast | None = None
        self.memory: MemoryUse | None = None
        self._clock = clock
        self._told_at = 0.0
        self._pace: deque[tuple[int, float, float]] = deque(maxlen=PACE_RECORDS)

    def start(self, step: int, steps: int) -> None:
        """The run goes from `step` to `steps`."""
        self.step, self.steps = step, steps
        self._told_at = self._clock()

    def update(self, event: Event) -> None:
        """Takes in what happened."""
        if isinstance(event, StepResult):
            now = self._clock()
            outside = max(0.0, now - self._told_at - event.seconds)
            self._pace.append((event.step - self.step, event.seconds, outside))
            self._told_at, self.step, self.last = now, event.step, event
        elif isinstance(event, JumpRecord):
            self.kept_jumps += event.verdict == "kept"
        elif isinstance(event, LossForecast):
            if event.target_step == self.steps:
                self.final = event
        elif isinstance(event, MemoryUse):
            self.memory = event

    def seconds_left(self) -> float | None:
        """Time to the end at the pace of the recent steps; None where nothing is known of it.

        Between two steps a batch is fetched every time, and now and then there is an evaluation or a checkpoint: the
        median of these pauses is what a step costs.
        """
        moved = sum(steps for steps, _, _ in self._pace)
        if moved <= 0:
            return None
        inside = sum(seconds for _, seconds, _ in self._pace)
        outside = statistics.median(pause for _, _, pause in self._pace) * len(self._pace)
        return (inside + outside) / moved * max(0, self.steps - self.step)

    def count(self) -> str:
        """The clock and its end."""
        return f"{self.step}/{self.steps}"

    def facts(self, width: int | None = None) -> str:
        """Everything else in one line, the less important left out where there is no room.

        Args:
            width: Characters there are; None is as many as needed.
        """
        shown = {name: text for name, text in self._texts().items() if text}
        for name in ("jumps", "memory", "final", "phase", "left", "loss"):
            line = "  ".join(shown.values())
            if width is None or len(line) <= width:
                return line
            if name == "final" and "final" in shown:
                shown["final"] = shown["final"].partition(" (")[0]  # without its interval, before it goes altogether
                line = "  ".join(shown.values())
                if len(line) <= width:
                    return line
            shown.pop(name, None)
        return ""

    def _texts(self) -> dict[str, str]:
        """All facts, in the order in which they are shown."""
        left = self.seconds_left()
        return {
            "phase": f"{self.last.phase:7}" if self.last else "",
            "loss": f"loss {self.last.loss:.4f}" if self.last else "",
            "final": _final(self.final) if self.final and self.step < self.steps else "",
            "jumps": f"jumps {self.kept_jumps}" if self.kept_jumps else "",
            "memory": _memory(self.memory) if self.memory else "",
            "left": f"{duration(left)} left" if left is not None else "",
        }


def _final(forecast: LossForecast) -> str:
    return f"final {_short(forecast.loss)} ({_short(forecast.low)}-{_short(forecast.high)})"


def _short(loss: float) -> str:
    """Three figures."""
    return f"{loss:.2f}" if abs(loss) >= 1 or loss == 0 else f"{loss:.3f}"


def _memory(use: MemoryUse) -> str:
    """The device's peak where there is a device, else the process's memory: what runs out first."""
    size = use.host_bytes if use.device_peak_bytes is None else use.device_peak_bytes
    return "" if size is None else f"{size / 2**30:.1f} GiB"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as on a clock."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
