"""Who hears of a step: the log first, then the display and those who find out more."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any

from hybridtrainer.observe.observers import observers
from hybridtrainer.observe.runlog import RunLog, read_log
from hybridtrainer.records import Event, LossForecast, MemoryUse, Phase, StepResult


class Display:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.messages: list[str] = []

    def start(self, step: int, steps: int) -> None: ...

    def record(self, record: Event) -> None:
        self.events.append(record)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def stop(self) -> None: ...


def feed(listeners: list[Any], first: int, last: int) -> None:
    for number in range(first, last + 1):
        for listener in listeners:
            listener(StepResult(number, Phase.FULL, 2 + 3 * number**-0.5, 0, None, 0.1, ""))


def test_forecasts_and_memory_stand_in_the_log_behind_their_step_and_are_shown(tmp_path):
    display, path = Display(), tmp_path / "log.jsonl"
    with RunLog(path) as log:
        feed(observers(display, log, 60, 0, None), 1, 60)
    records = read_log(path)
    at = {kind: [r["step"] for r in records if r["kind"] == kind] for kind in ("forecast", "memory")}
    assert at == {"forecast": [20, 20, 30, 30, 40, 40, 50, 50], "memory": [10, 20, 30, 40, 50, 60]}
    for before, record in pairwise(records):
        assert before["step"] == record["step"] or record["kind"] == "step"
    assert sum(isinstance(event, LossForecast) for event in display.events) == 8
    assert sum(isinstance(event, MemoryUse) for event in display.events) == 6
    forecast = next(record for record in records if record["kind"] == "forecast")
    assert set(forecast) == {"v", "kind", "step", "target_step", "loss", "low", "high", "window"}
    memory = next(record for record in records if record["kind"] == "memory")
    assert set(memory) == {"v", "kind", *(field.name for field in fields(MemoryUse))}


def test_without_a_log_the_display_is_still_told():
    display = Display()
    feed(observers(display, None, 60, 0, None), 1, 60)
    assert sum(isinstance(event, LossForecast) for event in display.events) == 8


def test_a_log_that_cannot_be_read_costs_the_forecasts_their_past_and_no_more(tmp_path):
    display, path = Display(), tmp_path / "log.jsonl"
    path.write_text("damaged\n")
    feed(observers(display, None, 1000, 500, path), 501, 600)
    assert "forecasts begin anew" in display.messages[0]
    assert next(event for event in display.events if isinstance(event, LossForecast)).step == 540
