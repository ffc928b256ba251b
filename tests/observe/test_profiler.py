"""The profiler by itself: any loop, any device, nothing changed in what is trained."""

from __future__ import annotations

from itertools import count

import psutil
import pytest
import torch
from tests.memory.cards import GIB, FakeAllocator, FakeDriver, card
from torch import nn

from hybridtrainer.errors import ConfigError, ModelError
from hybridtrainer.observe.profiler import MemoryProfiler
from hybridtrainer.observe.snapshots import Snapshot, read_snapshots
from hybridtrainer.records import JumpRecord, Phase, StepResult

WEIGHTS = 4 * (64 * 32 + 32)


def setup() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, update: bool = True) -> None:
    model(torch.ones(4, 64)).square().mean().backward()
    if update:
        optimizer.step()
    optimizer.zero_grad()


def test_components_are_counted_though_gradients_are_gone_when_the_step_is_recorded():
    model, optimizer = setup()
    profiler = MemoryProfiler(model, optimizer)
    profiler.start()
    for _ in range(15):
        train(model, optimizer)
        profiler.record_step(phase="full")
    for taken in profiler.snapshots:
        assert (taken.weights_bytes, taken.gradients_bytes) == (WEIGHTS, WEIGHTS)
        assert taken.states_bytes == 2 * WEIGHTS + 8
        assert taken.peak_bytes is not None and taken.other_bytes == taken.peak_bytes - 4 * WEIGHTS - 8
    assert [taken.step for taken in profiler.snapshots] == list(range(1, 16))


def test_a_step_without_an_update_has_no_gradients():
    model, optimizer = setup()
    profiler = MemoryProfiler(model, optimizer)
    profiler.start()
    train(model, optimizer)
    profiler.record_step("full")
    profiler.record_step("predict")
    assert [taken.gradients_bytes for taken in profiler.snapshots] == [WEIGHTS, 0]


def test_on_a_cpu_the_memory_of_the_process_is_profiled():
    profiler = MemoryProfiler()
    profiler.start()
    held = torch.ones(64 * 2**20 // 4)
    profiler.record_step()
    assert held.sum() > 0
    report = profiler.report()
    assert report.initial_bytes is not None and report.final_bytes is not None
    assert 32 * 2**20 < report.final_bytes - report.initial_bytes < 256 * 2**20
    assert report.limit_bytes == psutil.virtual_memory().total
    (taken,) = profiler.snapshots
    assert taken.weights_bytes is None and taken.reserved_bytes is None and taken.card_bytes is None
    assert taken.phase == "train"


def test_on_a_gpu_each_step_has_its_own_peak():
    allocator = FakeAllocator(1, 2, peak=1.5)
    profiler = MemoryProfiler(vram=card(allocator, driver=FakeDriver(3)), clock=count().__next__)
    profiler.start()
    for peak in (5.0, 2.0):
        allocator.hold(1, 6, peak=peak)
        profiler.record_step("full")
    peaks = [taken.peak_bytes for taken in profiler.snapshots]
    assert peaks == [5 * GIB, 2 * GIB]
    assert profiler.snapshots[0].card_bytes == 3 * GIB
    report = profiler.report()
    assert (report.initial_bytes, report.peak_bytes, report.reserved_peak_bytes) == (GIB, 5 * GIB, 6 * GIB)
    assert report.utilization == 6 / 16
    assert allocator.resets == 3


def test_what_is_trained_does_not_change_by_a_bit_and_the_optimizer_is_left_as_it_was():
    plain, plain_optimizer = setup()
    model, optimizer = setup()
    profiler = MemoryProfiler(model, optimizer)
    profiler.start()
    for _ in range(3):
        train(plain, plain_optimizer)
        train(model, optimizer)
        profiler.record_step()
    profiler.stop()
    assert torch.equal(plain.weight, model.weight)  # type: ignore[arg-type]
    assert not optimizer._optimizer_step_pre_hooks
    profiler.stop()


def test_export_writes_what_was_kept_and_refuses_where_nothing_was(tmp_path):
    profiler = MemoryProfiler()
    profiler.start()
    profiler.record_step("a", step=40)
    profiler.export(tmp_path / "p.csv")
    assert read_snapshots(tmp_path / "p.csv") == profiler.snapshots
    followed: list[Snapshot] = []
    light = MemoryProfiler(keep=False, follow=followed.append)
    light.start()
    light.record_step()
    assert light.snapshots == [] and len(followed) == 1
    with pytest.raises(ModelError, match="keep=True"):
        light.export(tmp_path / "q.csv")


def test_it_must_be_started_and_starting_again_forgets(tmp_path):
    profiler = MemoryProfiler()
    for call in (profiler.record_step, profiler.report, lambda: profiler.export(tmp_path / "p.csv")):
        with pytest.raises(ModelError, match="not started"):
            call()
    assert not list(tmp_path.iterdir())
    profiler.start()
    profiler.record_step()
    profiler.start()
    assert profiler.report().steps == 0 and profiler.snapshots == []


def test_once_stopped_it_takes_no_more_steps_and_keeps_what_it_has(tmp_path):
    profiler = MemoryProfiler()
    profiler.start()
    profiler.record_step()
    profiler.stop()
    with pytest.raises(ModelError, match="is stopped"):
        profiler.record_step()
    profiler.record(StepResult(2, Phase.FULL, 1.0, 1, 0.9, 0.1, ""))  # a trainer goes on without it
    assert profiler.report().steps == len(profiler.snapshots) == 1
    profiler.export(tmp_path / "p.csv")
    profiler.start()
    profiler.record_step()


@pytest.mark.parametrize("size", [-1, 0, "abc", 1.5, True, None])
def test_a_spike_is_a_positive_number_of_bytes(size):
    with pytest.raises(ConfigError, match="spike_bytes: must be a positive number of bytes"):
        MemoryProfiler(spike_bytes=size)


def test_as_a_listener_it_records_steps_and_nothing_else():
    profiler = MemoryProfiler()
    profiler.start()
    profiler.record(JumpRecord(3, 15, "line_fit", 0.9, "kept", ""))
    profiler.record(StepResult(18, Phase.PREDICT, 1.0, 15, 0.9, 0.1, ""))
    (taken,) = profiler.snapshots
    assert (taken.step, taken.phase) == (18, "predict")


def test_where_the_system_does_not_say_it_is_none(monkeypatch):
    def fail(*_: object) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "memory_info", fail)
    profiler = MemoryProfiler(*setup())
    profiler.start()
    profiler.record_step()
    (taken,) = profiler.snapshots
    assert (taken.peak_bytes, taken.used_bytes, taken.other_bytes) == (None, None, None)
    assert profiler.report().peak_bytes is None
