"""How fast bytes pass between host memory and the device."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch

from hybridtrainer.bench import link
from hybridtrainer.bench.link import Link, measure_link
from hybridtrainer.memory.arena import Arena


def test_a_rate_is_bytes_by_the_seconds_of_the_timed_repeats(monkeypatch):
    clock, done, waited = iter([10.0, 12.0]), [], []  # type: ignore[var-annotated]
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: waited.append(len(done)))
    rate = link.rate_of(lambda: done.append(1), amount=100, repeats=5, device=torch.device("cuda"))
    assert rate == 100 * 5 / 2.0
    assert waited == [1, 6]  # once before the clock starts, after a first one, and once before it stops


def test_copies_go_both_ways_and_memory_is_given_back(monkeypatch):
    rates: list[int] = []

    def rate(work, nbytes, repeats, device):
        work()
        rates.append(nbytes)
        return float(nbytes * repeats)

    closed: list[bool] = []
    monkeypatch.setattr(link, "rate_of", rate)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(Arena, "close", lambda _: closed.append(True))
    found = measure_link(torch.device("cpu"), nbytes=1 << 12, repeats=2)
    assert rates == [1 << 12, 1 << 12, 1 << 13]  # both directions at once carry twice as much
    assert found == Link(float(1 << 13), float(1 << 13), float(1 << 14))
    assert closed == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_has_a_link_and_both_ways_at_once_are_no_slower_than_one():
    found = measure_link(torch.device("cuda", 0), nbytes=1 << 26)
    assert min(found.inward, found.outward) > 1e8
    assert found.both > 0.8 * min(found.inward, found.outward)
