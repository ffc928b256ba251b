"""Memory in use: true figures, None where there are none, told in time."""

from __future__ import annotations

import psutil
import pytest
import torch
from tests.memory.cards import GIB, FakeAllocator, FakeDriver, card

from hybridtrainer.memory.pressure import Pressure
from hybridtrainer.observe import memory
from hybridtrainer.observe.memory import MemoryWatch, host_bytes
from hybridtrainer.records import JumpRecord, MemoryUse, Phase, PhaseChange, StepResult

CHANGE = PhaseChange(3, Phase.WARMUP, Phase.FULL, "because")


def step(number: int, phase: Phase = Phase.FULL) -> StepResult:
    return StepResult(number, phase, 2.5, 0, None, 0.1, "")


def watch(clock: int = 0) -> tuple[MemoryWatch, list[MemoryUse]]:
    told: list[MemoryUse] = []
    return MemoryWatch(None, told.append, clock), told


def test_host_memory_grows_with_what_is_held():
    before = host_bytes()
    held = torch.ones(64 * 2**20 // 4)
    after = host_bytes()
    assert before is not None and after is not None
    assert 32 * 2**20 < after - before < 256 * 2**20
    assert held.sum() > 0


@pytest.mark.parametrize("error", [psutil.AccessDenied(), psutil.NoSuchProcess(1), OSError("no /proc")])
def test_what_the_system_does_not_say_is_none_and_not_nought(monkeypatch, error):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(psutil.Process, "memory_info", fail)
    assert host_bytes() is None


def test_memory_is_told_every_tenth_step_of_the_clock():
    watcher, told = watch()
    for number in (*range(1, 26), 44, 45):  # a jump in between
        watcher.record(step(number))
    assert [use.step for use in told] == [10, 20, 44]


def test_memory_is_told_once_after_a_step_in_which_the_phase_changed():
    watcher, told = watch()
    watcher.record(step(1, Phase.WARMUP))
    watcher.record(CHANGE)
    watcher.record(CHANGE)
    watcher.record(JumpRecord(3, 15, "line_fit", 0.9, "kept", "because"))
    assert told == []
    watcher.record(step(2, Phase.WARMUP))
    watcher.record(step(3))
    (use,) = told
    assert (use.step, use.phase) == (2, Phase.WARMUP)
    assert use.entered is Phase.FULL
    assert use.host_bytes is not None and use.host_bytes > 2**20
    on_the_gpu = (use.device_bytes, use.device_peak_bytes, use.device_reserved_bytes, use.card_bytes)
    assert on_the_gpu == (None, None, None, None)


def test_a_resumed_run_goes_on_counting(monkeypatch):
    monkeypatch.setattr(memory, "host_bytes", lambda: None)
    watcher, told = watch(clock=17)
    for number in range(18, 22):
        watcher.record(step(number))
    assert [(use.step, use.host_bytes) for use in told] == [(20, None)]


def test_a_gpus_memory_is_told_with_what_the_driver_says_and_the_copies_made():
    allocator = FakeAllocator(2, 4, peak=3)
    told: list[MemoryUse] = []
    said: list[str] = []
    pressure = Pressure(card(allocator, driver=FakeDriver(5)), said.append, lambda: False)
    watcher = MemoryWatch(pressure, told.append, copies=lambda: 7)
    for number in range(1, 11):
        watcher.record(step(number))
    (use,) = told
    assert (use.device_bytes, use.device_peak_bytes, use.device_reserved_bytes) == (2 * GIB, 4 * GIB, 4 * GIB)
    assert (use.card_bytes, use.weight_copies, use.entered) == (5 * GIB, 7, None)
    assert said == []


def test_the_gpu_is_looked_at_after_every_step():
    allocator = FakeAllocator(2, 4)
    said: list[str] = []
    watcher = MemoryWatch(Pressure(card(allocator), said.append, lambda: False), lambda use: None)
    watcher.record(step(1))
    allocator.hold(14, 14)
    watcher.record(step(2))
    assert len(said) == 1
