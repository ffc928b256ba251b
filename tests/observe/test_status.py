"""The facts of a run in words: true, short, and no longer than there is room for."""

from __future__ import annotations

import pytest

from hybridtrainer.observe.status import Status, duration
from hybridtrainer.records import JumpRecord, LossForecast, MemoryUse, Phase, PhaseChange, StepResult


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def step(number: int, loss: float = 2.5, seconds: float = 0.1) -> StepResult:
    return StepResult(number, Phase.FULL, loss, 0, None, seconds, "")


def running(steps: int = 600) -> tuple[Status, Clock]:
    clock = Clock()
    status = Status(clock)
    status.start(0, steps)
    return status, clock


def full_status() -> Status:
    status, clock = running()
    clock.now += 1.0
    for event in (
        step(100, 1.93123),
        JumpRecord(3, 15, "line_fit", 0.9, "kept", "because"),
        JumpRecord(3, 15, "line_fit", 0.9, "refused", "because"),
        PhaseChange(3, Phase.WARMUP, Phase.FULL, "because"),
        LossForecast(100, 600, 1.934, 1.881, 2.011),
        LossForecast(100, 130, 7.0, 6.0, 8.0),
        MemoryUse(100, Phase.FULL, 1288490189, None, None),
    ):
        status.update(event)
    return status


def test_all_facts_are_said_in_one_line():
    line = "full     loss 1.9312  final 1.93 (1.88-2.01)  jumps 1  1.2 GiB  0:05 left"
    assert full_status().facts() == line
    assert full_status().count() == "100/600"


def test_where_room_is_short_the_less_important_is_left_out():
    status = full_status()
    shown = [status.facts(width) for width in range(80, -1, -1)]
    assert all(len(line) <= width for line, width in zip(shown, range(80, -1, -1), strict=True))
    assert list(dict.fromkeys(shown)) == [
        "full     loss 1.9312  final 1.93 (1.88-2.01)  jumps 1  1.2 GiB  0:05 left",
        "full     loss 1.9312  final 1.93 (1.88-2.01)  1.2 GiB  0:05 left",
        "full     loss 1.9312  final 1.93 (1.88-2.01)  0:05 left",
        "full     loss 1.9312  final 1.93  0:05 left",
        "full     loss 1.9312  0:05 left",
        "loss 1.9312  0:05 left",
        "loss 1.9312",
        "",
    ]


def test_at_the_end_there_is_nothing_left_to_forecast():
    status, _ = running()
    status.update(LossForecast(590, 600, 1.934, 1.881, 2.011))
    status.update(step(599))
    assert "final 1.93" in status.facts()
    status.update(step(600))
    assert "final" not in status.facts() and "loss" in status.facts()


def test_before_anything_happened_there_is_nothing_to_say():
    status, _ = running()
    assert (status.facts(), status.count(), status.seconds_left()) == ("", "0/600", None)


def test_the_pace_is_that_of_recent_steps():
    status, clock = running(1000)
    for number in range(1, 101):
        clock.now += 10.0 if number <= 50 else 1.0
        status.update(step(number, seconds=9.0 if number <= 50 else 0.8))
    assert status.seconds_left() == pytest.approx(900.0)


def test_an_evaluation_or_a_checkpoint_does_not_change_the_pace():
    status, clock = running(1000)
    for number in range(1, 101):
        clock.now += 1.0 + (500.0 if number % 20 == 0 else 0.0)
        status.update(step(number, seconds=0.8))
    assert status.seconds_left() == pytest.approx(900.0)


def test_jumps_count_for_what_they_move_the_clock():
    status, clock = running(200)
    for number in (10, 20, 30, 40, 50):
        clock.now += 2.0
        status.update(step(number, seconds=2.0))
    assert status.seconds_left() == pytest.approx(30.0)


def test_a_clock_that_goes_back_leaves_the_time_open():
    clock = Clock()
    status = Status(clock)
    status.start(50, 100)
    clock.now += 5
    status.update(step(40))
    assert status.seconds_left() is None
    assert "left" not in status.facts()


def test_memory_is_that_of_the_device_where_there_is_one():
    status, _ = running()
    status.update(MemoryUse(1, Phase.FULL, 2**30, 2**31, 3 * 2**30))
    assert status.facts() == "3.0 GiB"
    status.update(MemoryUse(1, Phase.FULL, None, None, None))
    assert status.facts() == ""


def test_small_losses_keep_their_figures():
    status, _ = running()
    status.update(LossForecast(1, 600, 0.0123, 0.0, 0.0351))
    assert status.facts() == "final 0.012 (0.00-0.035)"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (90, "1:30"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text
