"""Two lanes beside the computation, and the events that order them."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests.memory.support import DEVICES

from hybridtrainer.memory.lanes import CudaLanes, ThreadLanes, make_lanes


def test_the_work_of_one_lane_is_done_in_order():
    lanes, done = ThreadLanes(), []
    for number in range(20):
        lanes.submit("weights in", lambda number=number: done.append(number), [])  # type: ignore[misc]
    lanes.finish()
    assert done == list(range(20))


def test_lanes_run_beside_the_computation_and_beside_each_other():
    lanes, gate = ThreadLanes(), threading.Event()
    held = lanes.submit("weights in", lambda: _pass(gate), [])
    assert not held.done()  # the computation has gone on beside it
    lanes.wait(lanes.submit("weights out", gate.set, []))  # would wait for ever behind the other
    lanes.wait(held)
    assert held.done()


def test_work_begins_only_after_its_events():
    lanes, gate, done = ThreadLanes(), threading.Event(), []

    def work() -> None:
        _pass(gate)
        done.append("weights out")

    first = lanes.submit("weights out", work, [])
    second = lanes.submit("weights in", lambda: done.append("weights in"), [None, first])
    time.sleep(0.02)
    assert done == []
    gate.set()
    lanes.wait(second)
    assert done == ["weights out", "weights in"]


def test_finish_returns_when_both_lanes_are_empty():
    lanes = ThreadLanes(delay=lambda _: time.sleep(0.02))
    done: list[str] = []
    for lane in ("weights in", "weights out", "weights in"):
        lanes.submit(lane, lambda lane=lane: done.append(lane), [])  # type: ignore[misc]
    lanes.finish()
    assert sorted(done) == ["weights in", "weights in", "weights out"]


def test_the_computation_never_waits_for_itself():
    lanes, gate = ThreadLanes(), threading.Event()
    held = lanes.submit("weights in", lambda: _pass(gate), [])
    lanes.wait(lanes.mark())
    lanes.wait(None)
    assert not held.done()  # a lane that is busy has held nothing up
    gate.set()
    lanes.wait(held)


def test_an_error_in_a_lane_is_raised_where_it_is_waited_for():
    lanes, done = ThreadLanes(), []

    def fail() -> None:
        raise OSError("a cable was pulled")

    failed = lanes.submit("weights in", fail, [])
    after = lanes.submit("weights out", lambda: done.append(1), [failed])
    independent = lanes.submit("weights in", lambda: done.append(2), [])
    with pytest.raises(OSError, match="cable"):
        lanes.wait(failed)
    with pytest.raises(OSError, match="cable"):
        lanes.wait(after)  # what depends on it was not done
    lanes.wait(independent)
    assert done == [2]


def test_a_delay_is_called_in_the_lane_before_each_piece_of_work():
    seen: list[tuple[str, str]] = []
    lanes = make_lanes(torch.device("cpu"), lambda lane: seen.append((lane, threading.current_thread().name)))
    lanes.submit("weights in", lambda: None, [])
    lanes.finish()
    lanes.submit("weights out", lambda: None, [])
    lanes.finish()
    assert [lane for lane, _ in seen] == ["weights in", "weights out"]
    assert all(thread.startswith(f"copies-{lane}") for lane, thread in seen)


def test_a_cpu_measures_no_stalls():
    lanes = make_lanes(torch.device("cpu"))
    assert isinstance(lanes, ThreadLanes)
    lanes.watch_stalls()
    assert lanes.stalled_seconds() == 0.0


@pytest.mark.parametrize("device", DEVICES[1:])
def test_on_a_gpu_copies_wait_for_events_and_stalls_are_measured(device):
    lanes = make_lanes(torch.device(device), lambda _: torch.cuda._sleep(20_000_000))
    assert isinstance(lanes, CudaLanes)
    source = torch.ones(1 << 20, device=device)
    middle, target = torch.zeros_like(source), torch.zeros_like(source)
    lanes.watch_stalls()
    first = lanes.submit("weights out", lambda: _copy(middle, source), [lanes.mark()])
    lanes.wait(lanes.submit("weights in", lambda: _copy(target, middle), [first]))
    assert bool((target == 1).all())
    assert lanes.stalled_seconds() > 0.005
    assert lanes.stalled_seconds() == 0.0
    lanes.finish()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _pass(gate: threading.Event) -> None:
    assert gate.wait(5), "nobody opened the gate"
