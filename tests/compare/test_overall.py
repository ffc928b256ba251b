"""Many runs shown as one."""

from __future__ import annotations

from typing import Any

from hybridtrainer.compare.overall import Overall
from hybridtrainer.observe.progress import Silence
from hybridtrainer.records import Phase, PhaseChange, StepResult


class Shown(Silence):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.length = 0

    def start(self, step: int, steps: int) -> None:
        self.length = steps

    def record(self, record: Any) -> None:
        assert isinstance(record, StepResult)
        self.steps.append(record.step)


def step(clock: int) -> StepResult:
    return StepResult(clock, Phase.FULL, 1.0, 0, None, 0.1, "")


def test_the_clocks_of_all_parts_add_up():
    shown = Shown()
    overall = Overall(shown)
    first, second = overall.part(), overall.part()
    overall.start(40)
    first.start(0, 20)
    second.start(5, 20)  # was interrupted there
    for part, clock in ((first, 3), (second, 6), (first, 10)):
        part.record(step(clock))
    second.record(PhaseChange(1, Phase.WARMUP, Phase.FULL, ""))  # nothing to show
    assert shown.length == 40 and shown.steps == [8, 9, 16]


def test_the_next_stretch_begins_at_zero():
    shown = Shown()
    overall = Overall(shown)
    part = overall.part()
    overall.start(10)
    part.record(step(10))
    overall.start(10)
    overall.part().record(step(1))
    assert shown.steps == [10, 1]
