"""Plain copies between host memory and slots."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from hybridtrainer.memory import carriers
from hybridtrainer.memory.carriers import Carrier, copy, size
from hybridtrainer.memory.lanes import ThreadLanes


def made(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_what_lives_in_two_runs_comes_in_and_goes_home():
    lanes = ThreadLanes()
    carrier = Carrier(lanes, "states in", "states out")
    host, buffer = [made(1, 2), made(3)], torch.zeros(6, dtype=torch.uint8)
    home = [(0, host[0]), (4, host[1])]
    lanes.wait(carrier.fetch("key", home, buffer, []))
    assert buffer.tolist() == [1, 2, 0, 0, 3, 0]
    buffer.add_(10)
    lanes.wait(carrier.send("key", home, buffer, None).home)
    assert [run.tolist() for run in host] == [[11, 12], [13]]
    assert size(home) == 5


def test_copies_wait_for_what_they_are_told_to():
    lanes, gate = ThreadLanes(), threading.Event()
    carrier = Carrier(lanes, "weights in", "weights out")
    host, buffer = made(1), made(0)
    before = lanes.submit("states in", lambda: gate.wait(5), [])
    ready = carrier.fetch("key", [(0, host)], buffer, [before])
    assert not ready.done()
    gate.set()
    lanes.wait(ready)
    assert buffer.tolist() == [1]


def test_a_copy_in_pieces_is_the_same(monkeypatch):
    monkeypatch.setattr(carriers, "PIECE_BYTES", 3)
    source, target = torch.arange(10, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    copy(target, source)
    assert torch.equal(target, source)
