"""Follows a run step by step and tells, now and then, where its loss is heading. Fed with records; decides nothing.

What a forecast is made of is in `outlook.py`; this module only knows when one is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hybridtrainer.observe.outlook import Outlook, smoothing_steps
from hybridtrainer.records import LossForecast, Record, StepResult


class Lookout:
    """Tells two forecasts every fiftieth of the run: for a twentieth of it ahead, and for its end.

    Where the trainer tells how the loss goes on (`predict/dynamics.py`) only that of the end is told: one forecast of
    each thing is enough.

    Args:
        steps: Where the clock ends.
        tell: Called with every forecast.
        clock: Where it stands.
    """

    def __init__(self, steps: int, tell: Callable[[LossForecast], None], clock: int = 0) -> None:
        self._outlook = Outlook(steps)
        self._steps = steps
        self._interval = max(10, steps // 50)
        self._ahead = smoothing_steps(steps)
        self._tell = tell
        self._clock = clock
        self._due = False
        self._only_end = False

    def record(self, record: Record) -> None:
        """Takes in a step; forecasts are told when they are due."""
        if isinstance(record, LossForecast):
            self._only_end = True
        elif isinstance(record, StepResult):
            for forecast in self._observe(record.step, record.loss, record.predicted):
                self._tell(forecast)

    def replay(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Takes in the log of an interrupted run, so that its forecasts go on as if it had not been interrupted."""
        for record in log:
            if record["kind"] == "forecast" and record.get("window") is not None:
                self._only_end = True
            elif record["kind"] == "step":
                self._observe(int(record["step"]), float(record["loss"]), int(record["predicted"]))

    def _observe(self, step: int, loss: float, predicted: int) -> list[LossForecast]:
        before, self._clock = self._clock, step
        self._due = self._due or step // self._interval > before // self._interval
        if predicted:  # a jump has no loss of its own; the next real step will tell
            return []
        self._outlook.observe(step, loss)
        if not self._due or step >= self._steps:
            return []
        self._due = False
        near = () if self._only_end else (min(step + self._ahead, self._steps),)
        return self._outlook.forecast(*near, self._steps)
