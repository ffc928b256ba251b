"""How many blocks stay on the device: measured in two steps, decided once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hybridtrainer.memory import residency
from hybridtrainer.memory.layout import Kind, lay_out
from hybridtrainer.memory.packing import staging_bytes
from hybridtrainer.memory.residency import (
    DECIDED_STEPS,
    PACK_SHARE,
    PACK_USABLE_SHARE,
    STALL_SHARE,
    USABLE_SHARE,
    Residency,
    packs,
)

BUDGET, RESERVED = 10_000, 4_200
SPARE = int(USABLE_SHARE * BUDGET - RESERVED)


class Unit:
    """A block of 16-bit weights that are smaller than what is spare."""

    layout = lay_out([Kind("w", (32, 32), "split8", True)])


class Engine:
    """Only what residency looks at. Plays its own lanes and rings."""

    slot_bytes = Unit.layout.weight_bytes

    def __init__(self, stalled: float, device: str = "cuda") -> None:
        self.device = torch.device(device)
        self.lanes = self.rings = self.weights = self
        self.blocks, self.depth = (Unit(), Unit()), 2
        self.stalled = stalled
        self.calls: list[Any] = []
        self.has_room = True
        self.kept_bytes = 7

    def watch_stalls(self) -> None:
        self.calls.append("watch")

    def stalled_seconds(self) -> float:
        self.calls.append("read")
        return self.stalled

    def keep_on_device(self, spare_bytes: int, states: bool = True) -> int:
        """Leaves a third."""
        self.calls.append(spare_bytes if states else f"weights in {spare_bytes}")
        return spare_bytes // 3

    def pack(self) -> None:
        if not self.has_room:
            raise torch.OutOfMemoryError
        self.calls.append("pack")

    def pack_no_more(self) -> None:
        self.calls.append("pack no more")

    def spare_bytes(self) -> int:
        return self.kept_bytes


class Clock:
    """Steps take as long as is told; the last of them for ever after."""

    def __init__(self, seconds: list[float]) -> None:
        self.now, self.seconds = 0.0, seconds

    def step(self) -> None:
        self.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock([1.0])
    monkeypatch.setattr(time, "perf_counter", lambda: found.now)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _=None: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _=None: RESERVED)
    monkeypatch.setattr(residency, "HAS_TRITON", True)
    return found


def after_steps(
    engine: Any, clock: Clock, budget: int | None = BUDGET, steps: int = 6, may_pack: bool = False
) -> list[Any]:
    watched = Residency(engine, budget, may_pack)
    for _ in range(steps):
        clock.step()
        watched.after_step()
    calls: list[Any] = engine.calls
    return calls


def test_what_is_spare_is_used_after_the_second_step_and_only_then(clock):
    assert after_steps(Engine(stalled=0.5), clock, steps=1) == ["watch"]
    assert after_steps(Engine(stalled=0.5), clock, steps=2) == ["watch", "read", SPARE]
    assert after_steps(Engine(stalled=0.5), clock, steps=9) == ["watch", "read", SPARE]


def test_nothing_is_kept_where_the_computation_did_not_wait(clock):
    assert after_steps(Engine(stalled=STALL_SHARE), clock) == ["watch", "read"]
    assert after_steps(Engine(stalled=STALL_SHARE * 1.01), clock) == ["watch", "read", SPARE]


def test_a_model_that_has_yet_to_grow_decides_nothing(clock):
    engine: Any = Engine(stalled=1.0)
    engine.depth = 1
    assert after_steps(engine, clock) == []
    engine.depth = 2
    assert after_steps(engine, clock) == ["watch", "read", SPARE]


LAYOUT = Unit.layout
ROOM = staging_bytes(LAYOUT.weight_bytes)


@pytest.mark.parametrize(
    ("share", "spare", "wanted"),
    [(0.5, ROOM, True), (0.5, ROOM - 1, False), (0.5, None, True), (None, None, False), (PACK_SHARE, None, False)],
)
def test_weights_are_packed_where_steps_wait_long_and_there_is_room(share, spare, wanted):
    assert packs(share, spare, [LAYOUT]) == wanted


def test_weights_of_32_bits_are_not_packed():
    wide = lay_out([Kind("w", (32, 32), "fp32", True)])
    assert not packs(0.5, None, [wide])
    assert not packs(0.5, None, [LAYOUT, wide])


ROOMY = 3 * int((RESERVED + ROOM) / PACK_USABLE_SHARE)
ROOMY_SPARE = int(USABLE_SHARE * ROOMY - RESERVED)


AT_FIRST = max(0, ROOMY_SPARE - ROOM)
TRIED = ["watch", "read", f"weights in {AT_FIRST}", "pack"]


def test_packing_stays_where_steps_are_shorter_with_it(clock):
    # Two that are measured, one and two without, two and two with it; of each two the shorter counts.
    clock.seconds = [9.0, 1.0, 9.0, 2.0, 3.0, 9.0, 9.0, 1.9, 5.0, 100.0]
    assert after_steps(Engine(stalled=0.5), clock, ROOMY, 30, may_pack=True) == [*TRIED, AT_FIRST // 3]


@pytest.mark.parametrize("packed", [2.0, 3.0])
def test_packing_is_taken_back_where_steps_are_not(clock, packed):
    clock.seconds = [9.0, 1.0, 9.0, 3.0, 2.0, 0.1, 0.1, packed, packed, 0.1]
    found = after_steps(Engine(stalled=0.5), clock, ROOMY, DECIDED_STEPS, may_pack=True)
    assert found == [*TRIED, "pack no more", AT_FIRST // 3 + min(ROOMY_SPARE, ROOM)]


def test_nothing_is_decided_too_early(clock):
    for steps in (2, 4):
        assert after_steps(Engine(stalled=0.5), clock, ROOMY, steps, may_pack=True) == TRIED[:-1]
    for steps in (5, DECIDED_STEPS - 1):
        assert after_steps(Engine(stalled=0.5), clock, ROOMY, steps, may_pack=True) == TRIED


def test_packing_is_not_tried_where_it_is_not_allowed_or_cannot_help(clock, monkeypatch):
    kept = ["watch", "read", ROOMY_SPARE]
    assert after_steps(Engine(stalled=0.5), clock, ROOMY, 20, may_pack=False) == kept
    assert after_steps(Engine(stalled=0.05), clock, ROOMY, 20, may_pack=True) == kept
    monkeypatch.setattr(residency, "HAS_TRITON", False)
    assert after_steps(Engine(stalled=0.5), clock, ROOMY, 20, may_pack=True) == kept


def test_a_run_does_not_end_because_packing_finds_no_memory(clock):
    engine = Engine(stalled=0.5)
    engine.has_room = False
    assert after_steps(engine, clock, ROOMY, 30, may_pack=True) == [*TRIED[:-1], AT_FIRST // 3]


@pytest.mark.parametrize(("step", "has_room"), [(3, True), (DECIDED_STEPS - 1, True), (3, False)])
def test_what_was_given_up_because_memory_ran_out_is_not_taken_again(clock, step, has_room):
    engine: Any = Engine(stalled=0.5)
    engine.has_room = has_room
    watched = Residency(engine, ROOMY, may_pack=True)
    for number in range(1, 30):
        if number == step:
            engine.kept_bytes -= 1  # as `Rings.release` does
        clock.step()
        watched.after_step()
    assert engine.calls == ([*TRIED, "pack no more"] if has_room else TRIED[:-1])


def test_nothing_is_kept_where_there_is_no_room(clock):
    assert after_steps(Engine(stalled=0.5), clock, budget=RESERVED // 2)[-1] == 0


def test_without_a_budget_nothing_is_spare(clock):
    assert after_steps(Engine(stalled=0.5), clock, budget=None) == ["watch", "read", 0]


def test_without_a_gpu_nothing_is_even_measured(clock):
    assert after_steps(Engine(stalled=0.5, device="cpu"), clock) == []
