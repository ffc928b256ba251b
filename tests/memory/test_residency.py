"""How many blocks stay on the device: measured in two steps, decided once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hybridtrainer.memory.layout import Kind, lay_out
from hybridtrainer.memory.packing import staging_bytes
from hybridtrainer.memory.residency import (
    HAS_TRITON,
    PACK_SHARE,
    PACK_USABLE_SHARE,
    STALL_SHARE,
    USABLE_SHARE,
    Residency,
    packs,
)

BUDGET, RESERVED = 10_000, 4_200
SPARE = int(USABLE_SHARE * BUDGET - RESERVED)
KEPT = (SPARE, False)


class Unit:
    """A block of 16-bit weights that are smaller than what is spare."""

    layout = lay_out([Kind("w", (32, 32), "split8", True)])


class Engine:
    """Only what residency looks at. Plays its own lanes."""

    def __init__(self, stalled: float, device: str = "cuda") -> None:
        self.device = torch.device(device)
        self.lanes = self
        self.blocks, self.depth = (Unit(), Unit()), 2
        self.stalled = stalled
        self.calls: list[Any] = []

    def watch_stalls(self) -> None:
        self.calls.append("watch")

    def stalled_seconds(self) -> float:
        self.calls.append("read")
        return self.stalled

    def keep_on_device(self, spare_bytes: int, pack: bool) -> None:
        self.calls.append((spare_bytes, pack))


@pytest.fixture(autouse=True)
def _a_step_takes_one_second(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _=None: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _=None: RESERVED)


def after_steps(engine: Any, budget: int | None = BUDGET, steps: int = 6, may_pack: bool = True) -> list[Any]:
    residency = Residency(engine, budget, may_pack)
    for _ in range(steps):
        residency.after_step()
    calls: list[Any] = engine.calls
    return calls


def test_what_is_spare_is_used_after_the_second_step_and_only_then():
    assert after_steps(Engine(stalled=0.5), steps=1) == ["watch"]
    assert after_steps(Engine(stalled=0.5), steps=2) == ["watch", "read", KEPT]
    assert after_steps(Engine(stalled=0.5), steps=9) == ["watch", "read", KEPT]


def test_nothing_is_kept_where_the_computation_did_not_wait():
    assert after_steps(Engine(stalled=STALL_SHARE)) == ["watch", "read"]
    assert after_steps(Engine(stalled=STALL_SHARE * 1.01)) == ["watch", "read", KEPT]


def test_a_model_that_has_yet_to_grow_decides_nothing():
    engine: Any = Engine(stalled=1.0)
    engine.depth = 1
    assert after_steps(engine) == []
    engine.depth = 2
    assert after_steps(engine) == ["watch", "read", KEPT]


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


def test_an_engine_is_told_to_pack():
    budget = int((RESERVED + ROOM) / PACK_USABLE_SHARE) + 1
    spare = int(USABLE_SHARE * budget - RESERVED)
    assert after_steps(Engine(stalled=0.5), budget)[-1] == (spare, HAS_TRITON)
    assert after_steps(Engine(stalled=0.05), budget)[-1] == (spare, False)
    assert after_steps(Engine(stalled=0.5), budget, may_pack=False)[-1] == (spare, False)


def test_nothing_is_kept_where_there_is_no_room():
    assert after_steps(Engine(stalled=0.5), budget=3_000) == ["watch", "read", (0, False)]


def test_without_a_budget_nothing_is_spare():
    assert after_steps(Engine(stalled=0.5), budget=None) == ["watch", "read", (0, HAS_TRITON)]


def test_without_a_gpu_nothing_is_even_measured():
    assert after_steps(Engine(stalled=0.5, device="cpu")) == []
