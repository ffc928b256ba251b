"""Slots that many keys pass through: nothing is read too early, nothing is overwritten too early."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from hybridtrainer.memory import places
from hybridtrainer.memory.lanes import LANES, Event, Lane, ThreadLanes, make_lanes
from hybridtrainer.memory.places import Home, Slot
from hybridtrainer.memory.slots import POISON, Ring

CPU = torch.device("cpu")
BYTES = 8


class Bench:
    """A ring over six keys, each full of its own number, with lanes that can be held back."""

    def __init__(self, count: int, delay: Callable[[Lane], None] | None = None, poison: bool = False) -> None:
        self.gates = {lane: threading.Event() for lane in LANES}
        for gate in self.gates.values():
            gate.set()
        self.fetched: list[int] = []
        self.host = {key: torch.full((BYTES,), key, dtype=torch.uint8) for key in range(6)}
        self.lanes = ThreadLanes(delay or self._hold)
        self.ring = Ring[int](self.lanes, count, BYTES, CPU, lambda key: Home([(0, self.host[key])]), poison=poison)
        self.ring._fetch = self._watched  # type: ignore[method-assign]

    def _hold(self, lane: Lane) -> None:
        assert self.gates[lane].wait(5), f"nobody let the lane {lane} go on"

    def _watched(self, key: int, keep: Sequence[int]) -> Slot:
        self.fetched.append(key)
        return Ring._fetch(self.ring, key, keep)

    def hold(self, lane: Lane) -> None:
        self.gates[lane].clear()

    def let_go(self, lane: Lane, after_seconds: float = 0.0) -> None:
        threading.Timer(after_seconds, self.gates[lane].set).start()

    def holds(self) -> list[int | None]:
        return [slot.holds for slot in self.ring.slots]


def value(slot: Slot) -> list[int]:
    return sorted(set(slot.buffer.tolist()))


def test_the_computation_waits_until_a_slot_is_ready():
    bench = Bench(1)
    bench.hold("weights in")
    bench.let_go("weights in", 0.03)
    assert value(bench.ring.take(3)) == [3]


@pytest.mark.parametrize("is_used_again", [False, True])
def test_a_slot_is_not_overwritten_before_what_it_held_is_home(is_used_again):
    # Once the mark of the later use took the place of the copy home, and the next copy inward did not wait for that.
    bench = Bench(1)
    slot = bench.ring.take(0)
    slot.buffer.fill_(100)
    bench.hold("weights out")
    bench.ring.send_home(slot)
    if is_used_again:
        bench.ring.used(slot)
    bench.ring.prefetch([1])
    bench.let_go("weights out", 0.05)
    assert value(bench.ring.take(1)) == [1]
    bench.lanes.finish()
    assert bench.host[0].tolist() == [100] * BYTES


def test_an_update_in_place_waits_until_the_last_copy_home_has_read_the_slot():
    # Once the second update of a block that had stayed on the device was written under the first one's copy home.
    bench = Bench(1)
    slot = bench.ring.take(0)
    slot.buffer.fill_(100)
    bench.hold("weights out")
    bench.ring.send_home(slot)
    seen: list[int] = []
    copied = slot.home
    copied.add_done_callback(lambda _: seen.extend(set(bench.host[0].tolist())))
    bench.let_go("weights out", 0.05)
    again = bench.ring.take(0)
    assert again is slot
    bench.ring.may_write(again)
    assert copied.done()
    again.buffer.fill_(200)
    bench.lanes.finish()
    assert seen == [100]


def test_a_claimed_slot_may_be_written_at_once():
    bench = Bench(1)
    slot = bench.ring.take(0)
    slot.buffer.fill_(100)
    bench.hold("weights out")
    bench.ring.send_home(slot)
    bench.let_go("weights out", 0.05)
    claimed = bench.ring.claim(1)
    claimed.buffer.fill_(200)
    bench.lanes.finish()
    assert bench.host[0].tolist() == [100] * BYTES
    assert bench.fetched == [0]  # what the computation fills itself is not fetched
    assert bench.holds() == [1]
    assert value(bench.ring.take(1)) == [200]


def test_a_claim_waits_for_a_copy_that_is_still_coming_in():
    bench = Bench(1)
    bench.hold("weights in")
    bench.ring.prefetch([0])
    bench.let_go("weights in", 0.05)
    slot = bench.ring.claim(1)
    slot.buffer.fill_(200)
    bench.lanes.finish()
    assert value(slot) == [200]


def test_a_key_that_is_fetched_again_comes_with_what_was_sent_home():
    bench = Bench(2)
    slot = bench.ring.take(0)
    slot.buffer.fill_(100)
    bench.hold("weights out")
    bench.ring.send_home(slot)
    bench.ring.drop(0)
    slot.holds = 5  # so that the other slot is taken, which has no copy home to wait for
    bench.ring.prefetch([0], in_use=[5])
    bench.let_go("weights out", 0.05)
    again = bench.ring.take(0)
    assert again is not slot
    assert value(again) == [100]


def test_delays_of_any_length_lose_no_update():
    lengths = [0.0, 0.002, 0.0, 0.001, 0.004]
    turn = iter(range(10_000))
    bench = Bench(2, delay=lambda _: time.sleep(lengths[next(turn) % 5]), poison=True)
    for round_ in range(6):
        for key in range(6):
            slot = bench.ring.take(key, in_use=(key,))
            bench.ring.prefetch([(key + 1) % 6], in_use=(key,))
            assert value(slot) == [key + 10 * round_]
            bench.ring.may_write(slot)
            slot.buffer.add_(10)
            bench.ring.send_home(slot)
    bench.lanes.finish()
    assert [host.tolist() for host in bench.host.values()] == [[key + 60] * BYTES for key in range(6)]


def test_a_prefetch_never_evicts_what_is_in_use():
    bench = Bench(3)
    bench.ring.take(0)
    bench.ring.prefetch([1, 2, 3, 4], in_use=(0,))
    bench.lanes.finish()
    assert bench.holds() == [0, 1, 2]
    bench.ring.prefetch([2, 3, 4], in_use=(0,))
    bench.lanes.finish()
    assert sorted(key for key in bench.holds() if key is not None) == [0, 2, 3]
    assert value(bench.ring.take(0)) == [0]
    assert bench.fetched == [0, 1, 2, 3]


def test_a_prefetch_does_not_fetch_what_is_there_or_asked_for_twice():
    bench = Bench(3)
    bench.ring.prefetch([1, 1, 2, 1])
    bench.ring.prefetch([2, 1])
    assert bench.fetched == [1, 2]


def test_a_ring_of_one_slot_prefetches_nothing_beside_what_is_in_use():
    bench = Bench(1)
    bench.ring.take(0)
    bench.ring.prefetch([1, 2], in_use=(0,))
    assert bench.holds() == [0]
    for key in (1, 2, 1, 0):
        assert value(bench.ring.take(key, in_use=(key,))) == [key]


def test_pinned_keys_are_never_evicted():
    bench = Bench(1)
    bench.ring.pin([2, 4])
    assert (len(bench.ring.slots), len(bench.ring.pinned)) == (1, 2)
    for _ in range(2):
        for key in range(6):
            assert value(bench.ring.take(key, in_use=(key,))) == [key]
            bench.ring.prefetch(range(key + 1, 6), in_use=(key,))
    bench.lanes.finish()
    assert bench.fetched.count(2) == bench.fetched.count(4) == 1
    assert bench.fetched.count(0) == 2


def test_what_stays_is_sent_home_when_it_must_and_not_before():
    bench = Bench(1)
    bench.ring.pin([2])
    for key in (2, 3):
        slot = bench.ring.take(key, in_use=(key,))
        slot.buffer.fill_(100 + key)
        bench.ring.write_back(slot)
    bench.lanes.finish()
    assert bench.host[2].tolist() == [2] * BYTES
    assert bench.host[3].tolist() == [103] * BYTES
    bench.ring.bring_home()
    bench.lanes.finish()
    assert bench.host[2].tolist() == [102] * BYTES
    bench.host[2].fill_(50)
    bench.ring.bring_home()  # nothing has changed since
    bench.lanes.finish()
    assert bench.host[2].tolist() == [50] * BYTES


def test_what_was_dropped_is_not_sent_home_any_more():
    bench = Bench(1)
    bench.ring.pin([2])
    slot = bench.ring.take(2)
    slot.buffer.fill_(102)
    bench.ring.write_back(slot)
    bench.ring.drop(2)
    bench.ring.bring_home()
    bench.lanes.finish()
    assert bench.host[2].tolist() == [2] * BYTES


def test_a_pinned_key_can_be_given_up_and_nothing_of_it_is_lost():
    bench = Bench(1)
    bench.ring.pin([2, 4])
    for key in (2, 4):
        slot = bench.ring.take(key, in_use=(key,))
        slot.buffer.fill_(100 + key)
        bench.ring.write_back(slot)
    assert bench.ring.release(in_use=(2,))
    assert bench.host[4].tolist() == [104] * BYTES  # home before the slot is gone
    assert list(bench.ring.pinned) == [2]
    assert not bench.ring.release(in_use=(2,))
    assert bench.ring.release(in_use=())
    assert not bench.ring.release(in_use=())
    assert (len(bench.ring.slots), len(bench.ring.pinned)) == (1, 0)
    assert [value(bench.ring.take(key)) for key in (2, 4)] == [[102], [104]]


def test_a_pinned_key_that_has_never_come_can_be_given_up():
    bench = Bench(1)
    bench.ring.pin([2])
    assert bench.ring.release(in_use=())
    assert value(bench.ring.take(2)) == [2]


def test_a_key_that_was_passing_when_it_is_pinned_comes_anew_with_what_was_sent_home():
    bench = Bench(1)
    slot = bench.ring.take(2)
    slot.buffer.fill_(100)
    bench.hold("weights out")
    bench.ring.send_home(slot)
    bench.ring.pin([2])
    bench.let_go("weights out", 0.05)
    again = bench.ring.take(2)
    assert again is bench.ring.pinned[2]
    assert value(again) == [100]
    assert value(bench.ring.take(3)) == [3]


def test_a_place_of_its_own_is_as_large_as_its_key():
    bench = Bench(1)
    bench.host[2] = torch.full((3,), 2, dtype=torch.uint8)
    bench.ring.pin([2])
    assert bench.ring.take(2).buffer.tolist() == [2, 2, 2]


def test_a_ring_can_give_up_a_slot():
    bench = Bench(3)
    bench.ring.prefetch([0, 1, 2])
    assert bench.holds() == [0, 1, 2]
    bench.ring.narrow()
    assert bench.holds() == [1, 2]
    assert [value(bench.ring.take(key)) for key in (0, 2)] == [[0], [2]]


def test_the_slot_that_was_filled_longest_ago_is_the_next_to_go():
    # Its copy home ends first; any other would let the next copy inward wait.
    bench = Bench(3)
    for key in (0, 1, 2, 3, 4, 5):
        bench.ring.send_home(bench.ring.take(key))
        assert bench.holds()[-1] == key
    assert bench.holds() == [3, 4, 5]


def test_a_key_in_several_runs_comes_and_goes_whole():
    host = [torch.full((2,), 7, dtype=torch.uint8), torch.full((3,), 9, dtype=torch.uint8)]
    lanes = ThreadLanes()
    ring = Ring[int](lanes, 1, BYTES, CPU, lambda _: Home([(0, host[0]), (4, host[1])]), poison=True)
    slot = ring.take(0)
    assert slot.buffer.tolist() == [7, 7, POISON, POISON, 9, 9, 9, POISON]
    slot.buffer.add_(1)
    ring.send_home(slot)
    lanes.finish()
    assert [each.tolist() for each in host] == [[8, 8], [10, 10, 10]]
    ring.pin([0])
    assert ring.take(0).buffer.tolist()[4:] == [10, 10, 10]


def test_whether_keys_are_here_or_on_their_way():
    bench = Bench(2)
    bench.hold("weights in")
    bench.ring.prefetch([3, 4])
    assert bench.ring.has([3, 4]) and bench.ring.has([])
    assert not bench.ring.has([3, 5])
    bench.let_go("weights in")


def test_what_was_dropped_is_fetched_again():
    bench = Bench(3)
    for key in range(3):
        bench.ring.take(key)
    bench.host[1].fill_(70)
    bench.ring.drop(1)
    assert value(bench.ring.take(1)) == [70]
    assert bench.fetched == [0, 1, 2, 1]
    bench.ring.drop()
    assert bench.holds() == [None] * 3


def test_poison_fills_what_is_free_and_what_the_next_copy_leaves():
    bench = Bench(2, poison=True)
    assert [value(slot) for slot in bench.ring.slots] == [[POISON], [POISON]]
    assert torch.full((2,), POISON, dtype=torch.uint8).view(torch.bfloat16).isnan().all()
    slot = bench.ring.take(3)
    assert value(slot) == [3]
    bench.host[4] = torch.full((BYTES // 2,), 4, dtype=torch.uint8)
    bench.ring.take(5, in_use=(3,))
    small = bench.ring.take(4, in_use=(5,))
    assert small is slot
    assert small.buffer.tolist() == [4] * 4 + [POISON] * 4


def test_a_smaller_key_comes_and_goes_with_as_many_bytes_as_it_has():
    bench = Bench(1)
    bench.host[1] = torch.full((3,), 1, dtype=torch.uint8)
    slot = bench.ring.take(1)
    slot.buffer.add_(9)
    bench.ring.send_home(slot)
    bench.lanes.finish()
    assert bench.host[1].tolist() == [10, 10, 10]


def test_what_is_copied_in_pieces_is_whole(monkeypatch):
    monkeypatch.setattr(places, "PIECE_BYTES", 3)
    bench = Bench(1)
    bench.host[1] = torch.arange(BYTES, dtype=torch.uint8)
    slot = bench.ring.take(1)
    assert slot.buffer.tolist() == list(range(BYTES))
    slot.buffer.add_(1)
    bench.ring.send_home(slot)
    bench.lanes.finish()
    assert bench.host[1].tolist() == list(range(1, BYTES + 1))


def test_without_copies_all_keys_of_one_size_share_a_stand_in():
    bench = Bench(2)
    bench.host[5] = torch.full((3,), 5, dtype=torch.uint8)
    bench.ring.stop_copies()
    first, second, small = bench.ring.take(0), bench.ring.take(1), bench.ring.take(5)
    assert first is second
    assert first is not small
    assert (len(first.buffer), len(small.buffer)) == (BYTES, 3)
    small.buffer.fill_(99)
    bench.ring.send_home(small)
    bench.ring.prefetch([2, 3])
    assert small.home is None
    assert bench.holds() == [None, None]


def test_an_error_of_a_copy_reaches_the_computation():
    bench = Bench(1)
    bench.host[0] = torch.empty(BYTES, dtype=torch.uint8, device="meta")  # has nothing to copy
    with pytest.raises(NotImplementedError, match="meta"):
        bench.ring.take(0)


class Interrupted(ThreadLanes):
    """Lanes of which one takes no work, once: what is raised there is raised in the computation, as on a GPU."""

    refused: Lane | None = None

    def submit(self, lane: Lane, work: Callable[[], Any], after: Sequence[Event]) -> Future[None]:
        if lane == self.refused:
            self.refused = None
            raise KeyboardInterrupt
        return super().submit(lane, work, after)


def test_a_fetch_that_was_interrupted_is_made_again():
    lanes = Interrupted()
    ring = Ring[int](lanes, 1, BYTES, CPU, lambda key: Home([(0, torch.full((BYTES,), key, dtype=torch.uint8))]))
    ring.take(2)
    lanes.refused = "weights in"
    with pytest.raises(KeyboardInterrupt):
        ring.prefetch([3])
    assert value(ring.take(3)) == [3]


class Queued(ThreadLanes):
    """A computation that is queued, as a GPU's is: it has come to a mark when somebody says so."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Future[None]] = []

    def mark(self) -> Future[None]:
        self.marks.append(Future())
        return self.marks[-1]

    def arrive(self) -> None:
        for mark in self.marks:
            mark.set_result(None)


@pytest.mark.parametrize("stays", [False, True])
def test_nothing_comes_into_a_new_place_before_the_computation_is_done_with_what_was_there(stays):
    lanes = Queued()
    ring = Ring[int](
        lanes, 1, BYTES, CPU, lambda key: Home([(0, torch.full((BYTES,), key, dtype=torch.uint8))]), poison=True
    )
    if stays:
        ring.pin([3])
    slot = ring.pinned[3] if stays else ring.slots[0]
    threading.Timer(0.05, lanes.arrive).start()
    ring.prefetch([] if stays else [3])
    if not stays:
        assert value(slot) == [POISON]
    assert value(ring.take(3)) == [3]
    assert lanes.marks
    assert all(mark.done() for mark in lanes.marks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_memory_that_queued_work_still_reads_is_not_filled():
    device, nbytes = torch.device("cuda", 0), 32 << 20
    lanes, host = make_lanes(device), torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    ring = Ring[int](lanes, 1, 512, device, lambda _: Home([(0, host)]))
    ones = torch.ones(nbytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    found, place = ones.clone(), ones.data_ptr()
    del ones
    ring.pin([0])
    assert ring.pinned[0].buffer.data_ptr() == place  # what was asked for last is given out first
    ring.take(0)
    assert bool(found.all())


class Clocks:
    """Lanes in which nothing runs: an event is the set of all points that are over when it is."""

    def __init__(self) -> None:
        self.points = 0
        self.over: dict[str, set[int]] = {lane: set() for lane in (*LANES, "computation")}

    def _next(self, lane: str) -> frozenset[int]:
        self.points += 1
        self.over[lane].add(self.points)
        return frozenset(self.over[lane])

    def mark(self) -> Event:
        return self._next("computation")

    def wait(self, event: Event) -> None:
        self.over["computation"] |= event or set()

    def submit(self, lane: Lane, work: Callable[[], Any], after: Sequence[Event]) -> Event:
        for event in after:
            self.over[lane] |= event or set()
        return self._next(lane)

    def finish(self) -> None: ...

    def watch_stalls(self) -> None: ...

    def stalled_seconds(self) -> float:
        return 0.0


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_done_a_slot_is_filled_after_all_that_has_touched_it_and_read_when_it_is_filled(seed):
    lanes, choose = Clocks(), random.Random(seed)
    host = torch.zeros(BYTES, dtype=torch.uint8)
    ring = Ring[int](lanes, 3, BYTES, CPU, lambda _: Home([(0, host)]))
    touched: dict[Slot, set[int]] = {slot: set() for slot in ring.slots}
    sent: dict[int, int] = {}

    def watched(key: int, keep: Sequence[int]) -> Slot:
        slot = Ring._fetch(ring, key, keep)
        assert touched[slot] <= slot.ready
        assert sent.get(key, max(slot.ready)) in slot.ready
        touched[slot] = {lanes.points}
        return slot

    ring._fetch = watched  # type: ignore[method-assign]
    for _ in range(200):
        key = choose.randrange(6)
        slot = ring.take(key, in_use=(key,))
        assert slot.ready <= lanes.over["computation"]
        if choose.random() < 0.5:
            ring.may_write(slot)
            assert sent.get(key, 0) in {0, *lanes.over["computation"]}
            ring.write_back(slot)
            touched[slot] |= {lanes.points - 1, lanes.points}  # the computation, and the copy home
            sent[key] = lanes.points
        else:
            ring.used(slot)
            touched[slot].add(lanes.points)
        if choose.random() < 0.7:
            ring.prefetch(choose.sample(range(6), 2), in_use=(key,))
