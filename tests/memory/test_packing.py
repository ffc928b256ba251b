"""Weights that travel packed arrive as they were, and host memory is plain again when somebody wants to read it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait

import pytest
import torch
from tests.memory.support import LLAMA, Run, batches, build, failing_block, same, streamed, train
from torch import Tensor, nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.kernels.packed import ESCAPES, GROUP, pack_, packed_bytes
from hybridtrainer.memory import packing
from hybridtrainer.memory.lanes import ThreadLanes
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.packing import FEW_PLACES, Packing, piece_elements, place_bytes, places, staging_bytes
from hybridtrainer.memory.places import Home, Slot
from hybridtrainer.memory.slots import Ring
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.state import Training, capture, restore

CPU = torch.device("cpu")
ELEMENTS = 5 * GROUP + 128  # two pieces of two groups, one of one, and a rest that is no group


@pytest.fixture(autouse=True)
def _pieces_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PIECE_ELEMENTS", 2 * GROUP)


@pytest.fixture
def weights() -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0)).bfloat16()


class Bench:
    """One key in host memory, and a slot."""

    def __init__(self, weights: Tensor) -> None:
        self.host = weights.clone().view(torch.uint8)
        self.home = Home([(0, self.host)])
        self.slot = Slot(torch.zeros_like(self.host))
        self.lanes = ThreadLanes()
        self.packing = Packing(self.lanes, CPU, len(self.host))

    def send(self, weights: Tensor) -> None:
        self.slot.buffer.copy_(weights.view(torch.uint8))
        sent = self.packing.send("block", self.home, self.slot, None)
        self.lanes.wait(sent.read)
        self.slot.buffer.fill_(255)  # once it was read, the next key may come
        self.lanes.wait(sent.home)

    def fetch(self) -> Tensor:
        self.slot.buffer.fill_(255)
        self.lanes.wait(self.packing.fetch("block", self.home, self.slot, []))
        return self.slot.buffer.view(torch.bfloat16)

    def pieces_packed(self) -> list[int]:
        return sorted(self.packing._known["block"].packed)


def equal(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


def test_what_was_sent_is_what_is_fetched(weights):
    bench = Bench(weights)
    assert equal(bench.fetch(), weights)
    for factor in (2, 3, 4):
        bench.send(weights * factor)
        assert equal(bench.fetch(), weights * factor)


def test_the_first_time_a_key_goes_as_it_is_and_then_packed(weights):
    bench = Bench(weights)
    bench.send(weights)
    assert not bench.pieces_packed()
    assert bench.packing.packed() == []
    assert equal(bench.host.view(torch.bfloat16), weights)
    bench.send(weights)
    assert bench.pieces_packed() == [0, 1, 2]  # the rest is no group
    assert bench.packing.packed() == ["block"]
    assert not equal(bench.host.view(torch.bfloat16), weights)
    assert equal(bench.host.view(torch.bfloat16)[-128:], weights[-128:])


def test_host_memory_holds_a_packed_piece_where_the_piece_was(weights):
    bench = Bench(weights)
    bench.send(weights)
    marked = torch.full_like(bench.host, 7)
    bench.host.copy_(marked)
    bench.send(weights)
    first = packed_bytes(2 * GROUP)
    assert (bench.host[first : 4 * GROUP] == 7).all()
    assert not (bench.host[:first] == 7).all()


def spread(weights: Tensor, small: int) -> Tensor:
    """In the second piece a group with so many weights that are far smaller than the largest."""
    changed = weights.clone()
    changed[2 * GROUP : 3 * GROUP] = 1.0
    changed[2 * GROUP : 2 * GROUP + small] = 2.0**-20
    return changed


def test_a_piece_without_room_goes_as_it_is_until_it_has_some(weights):
    bench = Bench(weights)
    tight = spread(weights, ESCAPES + 1)
    for _ in range(2):
        bench.send(tight)
        assert equal(bench.fetch(), tight)
    assert bench.pieces_packed() == [0, 2]
    bench.send(weights)
    assert bench.pieces_packed() == [0, 2]  # what is known is of the time before
    bench.send(weights)
    assert bench.pieces_packed() == [0, 1, 2]
    assert equal(bench.fetch(), weights)


def test_what_one_update_makes_too_unequal_is_whole_at_once(weights):
    bench = Bench(weights)
    for _ in range(2):
        bench.send(weights)
    wide = spread(weights, 2 * ESCAPES)
    for packed in ([0, 1, 2], [0, 2], [0, 2]):  # the host learns of it when it is sent again
        bench.send(wide)
        assert bench.pieces_packed() == packed
        for _ in range(2):
            assert equal(bench.fetch(), wide)


def test_what_somebody_has_written_is_fetched_as_it_is(weights):
    bench = Bench(weights)
    for _ in range(2):
        bench.send(weights)
    bench.host.copy_((weights * 5).view(torch.uint8))
    bench.packing.forget("block")
    assert bench.packing.packed() == []
    assert equal(bench.fetch(), weights * 5)
    bench.send(weights * 7)
    assert equal(bench.fetch(), weights * 7)


def test_what_is_sent_plainly_can_be_read(weights):
    bench = Bench(weights)
    for _ in range(2):
        bench.send(weights)
    bench.slot.buffer.copy_(weights.view(torch.uint8))
    bench.lanes.wait(bench.packing.send_plainly("block", bench.home, bench.slot, None).home)
    assert equal(bench.host.view(torch.bfloat16), weights)
    assert equal(bench.fetch(), weights)


def test_bits_that_are_no_weights_travel_as_they_are():
    bits = torch.randint(0, 256, (2 * ELEMENTS,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    bench = Bench(bits.view(torch.bfloat16))
    for _ in range(3):
        bench.send(bits.view(torch.bfloat16))
        assert equal(bench.fetch(), bits.view(torch.bfloat16))
    assert not bench.pieces_packed()


class Queued(ThreadLanes):
    """A computation that is queued, as a GPU's is: it has come to its marks when somebody says so."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: Future[None] = Future()

    def mark(self) -> Future[None]:
        return self.reached


def test_nothing_is_counted_before_the_computation_has_made_the_place_for_it(weights):
    lanes, home = Queued(), Home([(0, weights.view(torch.uint8))])
    slot = Slot(torch.zeros(2 * ELEMENTS, dtype=torch.uint8))
    sent = Packing(lanes, CPU, 2 * ELEMENTS).send("block", home, slot, None)
    wait([sent.read], timeout=0.05)
    assert not sent.read.done()
    lanes.reached.set_result(None)
    lanes.finish()


def test_places_are_as_large_and_as_many_as_what_passes_needs():
    assert piece_elements(2 * 8 * GROUP) == 2 * GROUP
    assert piece_elements(2 * 3 * GROUP + 2) == piece_elements(2) == GROUP
    assert piece_elements(1 << 40) == 2 * GROUP
    assert places(16 * GROUP) == FEW_PLACES
    assert places(120 * GROUP) == 10
    assert place_bytes(16 * GROUP) == packed_bytes(2 * GROUP)
    bench = Bench(torch.zeros(GROUP, dtype=torch.bfloat16))
    held = sum(place.buffer.nbytes for place in (*bench.packing._coming, *bench.packing._going))
    assert held == staging_bytes(2 * GROUP)


@pytest.fixture
def ring() -> Iterator[tuple[Ring[int], dict[int, Tensor]]]:
    """Two slots for five keys, one of which stays."""
    hosts = {key: torch.full((ELEMENTS,), key + 1.0).bfloat16().view(torch.uint8) for key in range(5)}
    lanes = ThreadLanes()
    found = Ring[int](lanes, 2, 2 * ELEMENTS, CPU, lambda key: Home([(0, hosts[key])]), poison=True)
    before = found.nbytes
    found.pack()
    assert found.nbytes == before + staging_bytes(2 * ELEMENTS)
    found.pin([3])
    yield found, hosts
    lanes.finish()


def test_a_ring_that_packs_has_all_at_home_when_it_is_asked(ring):
    found, hosts = ring
    for _ in range(3):
        for key in hosts:
            slot = found.take(key)
            found.may_write(slot)
            slot.buffer.view(torch.bfloat16).mul_(2)
            found.write_back(slot)
            found.prefetch([(key + 1) % 5, (key + 2) % 5], in_use=(key,))
    found.bring_home()
    found._lanes.finish()
    for key, host in hosts.items():
        assert (host.view(torch.bfloat16) == 8 * (key + 1)).all(), key
    assert found._carrier.packed() == []


def test_a_ring_that_packs_no_more_has_lost_nothing(ring):
    found, hosts = ring
    plainly = found.nbytes - staging_bytes(found.slot_bytes)
    for _ in range(3):
        for key in hosts:
            slot = found.take(key)
            found.may_write(slot)
            slot.buffer.view(torch.bfloat16).mul_(2)
            found.write_back(slot)
    found.pack_no_more()
    assert not found.is_packed and found.nbytes == plainly
    for key, host in hosts.items():
        assert (found.take(key).buffer.view(torch.bfloat16) == 8 * (key + 1)).all()
        if key != 3:  # which stays
            assert (host.view(torch.bfloat16) == 8 * (key + 1)).all()


def test_a_ring_that_packs_gives_up_what_stays_without_loss(ring):
    found, hosts = ring
    for _ in range(2):
        slot = found.take(3)
        found.may_write(slot)
        slot.buffer.view(torch.bfloat16).add_(1)
        found.write_back(slot)
        found.bring_home()
    assert found.release(())
    assert (found.take(3).buffer.view(torch.bfloat16) == 6).all()
    assert (hosts[3].view(torch.bfloat16) == 6).all()


def test_a_ring_that_packs_takes_no_memory_to_give_up_what_stays(ring, monkeypatch):
    found, hosts = ring
    slot = found.take(3)
    slot.buffer.view(torch.bfloat16).add_(1)
    found.write_back(slot)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Packing, "_new", full)
    assert found.release(())
    assert (hosts[3].view(torch.bfloat16) == 5).all()


def test_what_was_foreseen_and_not_used_is_not_unpacked_over_what_came_after_it(weights):
    # Once a plain copy into its slot did not wait for the lane that unpacks, and was overwritten.
    wide = torch.randint(0, 256, (2 * ELEMENTS,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    hosts = {0: weights.view(torch.uint8).clone(), **{key: wide.roll(key) for key in (1, 2, 3)}}
    gate = threading.Event()
    gate.set()
    lanes = ThreadLanes(lambda lane: None if lane != "unpacking" or gate.wait(5) else pytest.fail("nobody let go"))
    ring = Ring[int](lanes, 2, 2 * ELEMENTS, CPU, lambda key: Home([(0, hosts[key])]))
    ring.pack()
    for key in (0, 1, 2, 3) * 2:
        ring.write_back(ring.take(key))
        lanes.finish()
    assert ring._carrier.packed() == [0]
    gate.clear()
    ring.prefetch([0], in_use=(3,))
    ring.prefetch([1, 2])
    threading.Timer(0.05, gate.set).start()
    for key in (1, 2):
        assert torch.equal(ring.take(key).buffer, wide.roll(key)), key


def packed_model(pack: bool, model: nn.Module | None = None) -> tuple[nn.Module, StreamedOptimizer]:
    model, optimizer = streamed(MemoryConfig(mode="split8", max_gpu_blocks=2), model=model or build(LLAMA))
    if pack:
        optimizer.engine.rings.weights.pack()
    return model, optimizer


def unsettled(model: nn.Module, optimizer: StreamedOptimizer, steps: int, pack: bool) -> None:
    """Trains and leaves host memory as it is: packed."""
    for batch in batches(steps):
        gpt_loss(model, batch).mean().backward()
        optimizer.step()
        optimizer.engine.lanes.finish()  # so that the next step knows what this one has found to fit
    assert bool(optimizer.engine.rings.weights._carrier.packed()) == pack


def after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch, pack: bool) -> Run:
    model, optimizer = packed_model(pack)
    good = copy.deepcopy(optimizer.state_dict())
    unsettled(model, optimizer, 3, pack)
    with failing_block(monkeypatch, 3), pytest.raises(RuntimeError, match="cosmic"):
        gpt_loss(model, batches(1)[0]).mean().backward()
    optimizer.give_up()
    optimizer.load_state_dict(good)  # of the optimizer alone: the weights are left as they are
    return train(model, optimizer, batches(2))


def test_weights_that_a_failed_step_has_left_are_not_lost(monkeypatch):
    assert same(after_a_step_that_failed(monkeypatch, pack=True), after_a_step_that_failed(monkeypatch, pack=False))


def after_a_way_back(pack: bool) -> Run:
    model = build(LLAMA)
    for block in model.blocks:
        block.mlp.requires_grad_(False)
    streamed_model, optimizer = packed_model(pack, model)
    training = Training(streamed_model, optimizer, None, None)
    before = copy.deepcopy(capture(training, frozen=False))
    unsettled(streamed_model, optimizer, 3, pack)
    restore(training, before)
    return train(streamed_model, optimizer, batches(2))


def test_frozen_weights_that_nobody_writes_back_are_as_they_were():
    assert same(after_a_way_back(pack=True), after_a_way_back(pack=False))


@pytest.mark.parametrize("outer", ["model", "optimizer"])
def test_a_run_goes_on_from_its_checkpoint_alone(outer):
    model, optimizer = packed_model(pack=True)
    expected = train(*packed_model(pack=False), batches(5))
    train(model, optimizer, batches(5)[:3])
    good = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    unsettled(model, optimizer, 2, pack=True)
    if outer == "model":
        model.load_state_dict(good[0])
        optimizer.load_state_dict(good[1])
    else:
        optimizer.load_state_dict(good[1])
        model.load_state_dict(good[0])
    torch.manual_seed(7)
    found = train(model, optimizer, batches(5)[3:])
    assert all(torch.equal(weight, expected.weights[name]) for name, weight in found.weights.items())


def test_weights_that_become_too_unequal_are_trained_as_without_packing(monkeypatch):
    kept = []

    def counted(raw: Tensor, packed: Tensor, rest: Tensor, whole: Tensor, most: Tensor) -> None:
        pack_(raw, packed, rest, whole, most)
        kept.append(bool(whole.any()))

    monkeypatch.setattr(packing, "pack_", counted)
    runs = []
    for pack in (True, False):
        model, optimizer = packed_model(pack)
        unsettled(model, optimizer, 3, pack)
        optimizer.settle()
        with torch.no_grad():
            flat = model.get_parameter("blocks.1.mlp.up.weight").view(-1)
            flat[: 2 * GROUP] = 512.0
            flat[: 2 * GROUP : 4] = 0.0  # which the next update makes a thousandth
        runs.append(train(model, optimizer, batches(3)))
    assert same(*runs)
    assert any(kept) and not all(kept)


def test_parameters_that_are_written_where_they_lie_packed_are_missed():
    model, optimizer = packed_model(pack=True)
    unsettled(model, optimizer, 3, pack=True)
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.up.weight").mul_(2)
    with pytest.raises(ModelError, match=r"block 1 .*settle"):
        gpt_loss(model, batches(1)[0])


def test_states_that_are_written_leave_packed_weights_alone():
    runs = []
    for pack in (True, False):
        model, optimizer = packed_model(pack)
        low = next(iter(optimizer.state.values()))["low"]
        unsettled(model, optimizer, 3, pack)
        low.zero_()
        runs.append(train(model, optimizer, batches(2)))
    assert same(*runs)


def test_an_error_in_a_lane_is_raised(monkeypatch):
    model, optimizer = packed_model(pack=True)
    monkeypatch.setattr(packing, "pack_", lambda *_: int("nothing"))
    with pytest.raises(ValueError, match="nothing"):
        train(model, optimizer, batches(3))
