"""Measuring a GPU: what is counted, that nothing is measured without one, and that it is told."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
import torch

from hybridtrainer.bench import calibrate as module
from hybridtrainer.bench.calibrate import as_measured, calibrate, describe, launch_seconds, memory_rate, product_rate
from hybridtrainer.bench.link import Link
from hybridtrainer.errors import ModelError

CPU = torch.device("cpu")


@pytest.fixture
def counted(monkeypatch):
    """What each measurement counts as its work, which is done once."""
    amounts: list[tuple[int, int]] = []

    def rate_of(work, amount, repeats, device):
        work()
        amounts.append((amount, repeats))
        return 7.0

    monkeypatch.setattr(module, "rate_of", rate_of)
    return amounts


def test_a_product_counts_two_operations_for_each_of_its_terms(counted):
    assert product_rate(CPU, side=16, repeats=3) == 7.0
    assert counted == [(2 * 16**3, 3)]


def test_a_sum_reads_two_tensors_and_writes_one(counted):
    assert memory_rate(CPU, elements=64, repeats=2) == 7.0
    assert counted == [(3 * 64 * 2, 2)]


def test_a_launch_is_the_time_of_a_small_step_over_its_kernels(monkeypatch):
    clock = iter([100.0, 103.0, 200.0, 203.0, 300.0, 390.0])  # of three steps, the last of which was held up
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    seconds = launch_seconds(CPU, steps=3)
    assert 100 < 3.0 / seconds < 1000  # kernels


def test_what_is_in_use_beyond_torch_counts_as_cudas_own():
    found = as_measured(Link(1.0, 2.0, 3.0), 4.0, 5.0, 6.0, (10 << 30, 12 << 30), 1 << 30)
    assert (found.inward, found.outward, found.both, found.flops, found.memory, found.launch) == (1, 2, 3, 4, 5, 6)
    assert (found.context_bytes, found.vram_bytes) == (1 << 30, 12 << 30)
    assert found.date == datetime.now(UTC).date().isoformat()
    text = describe("My Card", found)
    assert "My Card, 12.0 GiB, 1.00 of them taken" in text and "TFLOP/s" in text and "both ways" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_gpu_nothing_is_measured(device, counted, monkeypatch):
    monkeypatch.setattr(module, "measure_link", lambda _: pytest.fail("measured"))
    with pytest.raises(ModelError, match="no GPU here") as refused:
        calibrate(torch.device(device))
    assert "plan --hardware" in refused.value.remedy
    assert counted == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_has_speeds():
    found = calibrate(torch.device("cuda", 0))
    assert 1e12 < found.flops < 1e16 and 1e10 < found.memory < 1e14
    assert 1e-7 < found.launch < 1e-2
    assert 0 < found.context_bytes < found.vram_bytes
