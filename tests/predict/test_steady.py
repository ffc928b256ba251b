"""What is repeated does what was done step by step, and a mailbox keeps its place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hybridtrainer.predict.steady import RUNS_BEFORE, Mailbox, Repeated


class Graph:
    """In place of CUDA's, on a machine without it: what is done while it is open is taken for recorded."""

    made: list[Graph]
    fails = False

    def __init__(self) -> None:
        self.made.append(self)
        self.open, self.replays = False, 0

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.open = True

    def capture_end(self) -> None:
        assert self.open
        self.open = False
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    def replay(self) -> None:
        assert not self.open
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch) -> type[Graph]:
    kind = type("Graph", (Graph,), {"made": []})
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return kind


def counting() -> tuple[list[int], Callable[[], object]]:
    runs: list[int] = []
    return runs, lambda: runs.append(0)


def test_on_a_cpu_it_is_run_step_by_step(graphs):
    runs, work = counting()
    repeated = Repeated(work, "cpu")
    for _ in range(10):
        repeated()
    assert len(runs) == 10 and not repeated.is_recorded and graphs.made == []


def test_nothing_is_recorded_while_anomalies_are_looked_for(graphs):
    """Which waits for the device in a backward pass, and a recording that fails costs more than one that waits."""
    runs, work = counting()
    repeated = Repeated(work, "cuda")
    with torch.autograd.set_detect_anomaly(True):
        for _ in range(RUNS_BEFORE + 2):
            repeated()
    assert len(runs) == RUNS_BEFORE + 2 and graphs.made == []
    repeated()
    assert repeated.is_recorded


def test_on_a_gpu_it_is_recorded_once_and_repeated(graphs):
    runs, work = counting()
    repeated = Repeated(work, "cuda")
    for call in range(10):
        repeated()
        assert repeated.is_recorded is (call >= RUNS_BEFORE)
    assert len(runs) == RUNS_BEFORE + 1  # and once while it was recorded
    assert [graph.replays for graph in graphs.made] == [10 - RUNS_BEFORE]
    repeated.forget()
    for _ in range(5):
        repeated()
    assert [graph.replays for graph in graphs.made] == [10 - RUNS_BEFORE, 5 - RUNS_BEFORE]


def test_what_cannot_be_recorded_goes_on_step_by_step_and_is_not_tried_again(graphs):
    graphs.fails = True
    runs, work = counting()
    repeated = Repeated(work, "cuda")
    for _ in range(10):
        repeated()
    assert len(graphs.made) == 1 and not repeated.is_recorded
    assert len(runs) == 10 + 1  # that which failed to be recorded did nothing on the device


def test_an_error_of_its_own_while_it_is_recorded_ends_the_recording(graphs):
    runs: list[int] = []

    def work() -> None:
        runs.append(0)
        if len(runs) == RUNS_BEFORE + 1:
            raise torch.OutOfMemoryError("injected")

    repeated = Repeated(work, "cuda")
    for _ in range(6):
        repeated()
    assert not graphs.made[0].open and not repeated.is_recorded and len(runs) == 7


def test_what_is_put_in_is_found_at_the_same_place():
    mailbox = Mailbox("cpu")
    values = [torch.randn(2, 3), torch.arange(4), torch.empty(0), torch.randn(5)]
    first = mailbox.put(values)
    assert all(
        torch.equal(there, value) and there.dtype == value.dtype for there, value in zip(first, values, strict=True)
    )
    values = [value + 1 for value in values]
    again = mailbox.put(values)
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert all(torch.equal(there, value) for there, value in zip(again, values, strict=True))
    other = mailbox.put([torch.randn(2, 4), *values[1:]])
    assert other[0].shape == (2, 4) and other[0] is not first[0] and torch.equal(other[1], values[1])


def test_all_parts_of_a_type_are_sent_in_one_copy():
    parts = Mailbox("cpu").put([torch.randn(2, 3), torch.arange(4), torch.randn(5)])
    assert parts[0].untyped_storage().data_ptr() == parts[2].untyped_storage().data_ptr()
    assert parts[0].untyped_storage().data_ptr() != parts[1].untyped_storage().data_ptr()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_computes_what_the_steps_compute():
    mailbox = Mailbox("cuda")
    (value,) = mailbox.put([torch.ones(1000)])
    total = torch.zeros(1000, device="cuda")
    repeated = Repeated(lambda: total.add_(value.sqrt()), "cuda")
    for number in range(10):
        mailbox.put([torch.full((1000,), float(number * number))])
        repeated()
    assert repeated.is_recorded
    assert bool((total == 45.0).all())
