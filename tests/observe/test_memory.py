"""Memory in use: true figures, None where there are none, told in time."""

from __future__ import annotations

import psutil
import pytest
import torch

from hybridtrainer.observe import memory
from hybridtrainer.observe.memory import MemoryWatch, device_bytes, host_bytes
from hybridtrainer.records import JumpRecord, MemoryUse, Phase, PhaseChange, StepResult

CPU = torch.device("cpu")
CHANGE = PhaseChange(3, Phase.WARMUP, Phase.FULL, "because")


def step(number: int, phase: Phase = Phase.FULL) -> StepResult:
    return StepResult(number, phase, 2.5, 0, None, 0.1, "")


def watch(clock: int = 0) -> tuple[MemoryWatch, list[MemoryUse]]:
    told: list[MemoryUse] = []
    return MemoryWatch(CPU, told.append, clock), told


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


def test_without_a_gpu_its_memory_is_none():
    assert device_bytes(CPU) == (None, None)
    if not torch.cuda.is_available():
        assert device_bytes(torch.device("cuda")) == (None, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_tells_what_it_holds_and_the_peak_is_not_reset():
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    before, _ = device_bytes(device)
    held = torch.ones(2**24, device=device)
    after, peak = device_bytes(device)
    assert before is not None and after is not None and peak is not None
    assert after - before >= held.nbytes
    del held
    torch.cuda.empty_cache()
    assert device_bytes(device)[1] == peak


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
    assert use.host_bytes is not None and use.host_bytes > 2**20
    assert (use.device_bytes, use.device_peak_bytes) == (None, None)


def test_a_resumed_run_goes_on_counting(monkeypatch):
    monkeypatch.setattr(memory, "host_bytes", lambda: None)
    watcher, told = watch(clock=17)
    for number in range(18, 22):
        watcher.record(step(number))
    assert [(use.step, use.host_bytes) for use in told] == [(20, None)]
