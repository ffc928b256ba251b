"""The memory of a GPU: whose figures count, and against what."""

from __future__ import annotations

import pytest
import torch
from tests.memory.cards import GIB, FakeAllocator, FakeDriver, card

from hybridtrainer.memory.vram import CudaAllocator, Vram, vram_of


def test_without_a_gpu_there_is_none():
    assert vram_of(torch.device("cpu")) is None
    if not torch.cuda.is_available():
        assert vram_of(torch.device("cuda")) is None


def test_the_share_is_of_the_card_and_counts_other_processes():
    assert card(FakeAllocator(2, 4)).read().share == 0.25
    assert card(FakeAllocator(2, 4), driver=FakeDriver(8)).read().share == 0.5
    assert card(FakeAllocator(2, 4), driver=FakeDriver(2)).read().share == 0.25  # the driver's answer is older


def test_what_the_driver_does_not_say_is_none():
    assert card(FakeAllocator(2, 4), driver=FakeDriver(None)).read().card_bytes is None
    assert card(FakeAllocator(2, 4)).read().card_bytes is None


def test_against_a_budget_only_torchs_memory_counts():
    use = card(FakeAllocator(2, 4), budget_gib=8, driver=FakeDriver(12)).read()
    assert (use.share, use.limit_bytes, use.card_bytes) == (0.5, 8 * GIB, 12 * GIB)
    assert card(FakeAllocator(2, 4), budget_gib=32).read().limit_bytes == 16 * GIB


def test_what_a_streamed_model_gives_up_by_itself_does_not_count():
    vram = Vram(FakeAllocator(6, 8), 16 * GIB, spare=lambda: 4 * GIB)
    assert vram.read().share == 0.25


def test_peaks_begin_anew_and_the_highest_stays():
    allocator = FakeAllocator(2, 9, peak=8)
    vram = card(allocator)
    assert vram.begin_peaks().allocated_peak_bytes == 8 * GIB
    allocator.hold(2, 5, peak=3)
    use = vram.read()
    assert (use.allocated_peak_bytes, use.highest_allocated_bytes) == (3 * GIB, 8 * GIB)
    assert (use.reserved_peak_bytes, use.highest_reserved_bytes) == (5 * GIB, 9 * GIB)
    assert allocator.resets == 1


def test_torchs_figures_are_read_in_one_call(monkeypatch):
    figures = {
        "allocated_bytes": {"all": {"current": 1, "peak": 2, "allocated": 9, "freed": 9}},
        "reserved_bytes": {"all": {"current": 3, "peak": 4}},
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: figures)
    assert CudaAllocator(torch.device("cuda", 0)).read() == (1, 2, 3, 4)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
    assert CudaAllocator(torch.device("cuda", 0)).read() == (0, 0, 0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_tells_what_it_holds():
    vram = vram_of(torch.device("cuda", 0))
    assert vram is not None
    before = vram.read()
    held = torch.ones(2**24, device="cuda")
    after = vram.read()
    assert after.allocated_bytes - before.allocated_bytes >= held.nbytes
    assert after.limit_bytes == torch.cuda.get_device_properties(0).total_memory
    del held
    torch.cuda.empty_cache()
    assert vram.read().highest_reserved_bytes >= after.reserved_bytes
