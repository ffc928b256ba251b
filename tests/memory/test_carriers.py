"""Plain copies between host memory and slots."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from hybridtrainer.memory.carriers import Carrier
from hybridtrainer.memory.lanes import ThreadLanes
from hybridtrainer.memory.places import Home, Slot


def made(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_what_lives_in_two_runs_comes_in_and_goes_home():
    lanes = ThreadLanes()
    carrier = Carrier(lanes, "states in", "states out")
    host, slot = [made(1, 2), made(3)], Slot(torch.zeros(6, dtype=torch.uint8))
    home = Home([(0, host[0]), (4, host[1])])
    lanes.wait(carrier.fetch("key", home, slot, []))
    assert slot.buffer.tolist() == [1, 2, 0, 0, 3, 0]
    slot.buffer.add_(10)
    lanes.wait(carrier.send("key", home, slot, None).home)
    assert [run.tolist() for run in host] == [[11, 12], [13]]


def test_copies_wait_for_what_they_are_told_to():
    lanes, gate = ThreadLanes(), threading.Event()
    carrier = Carrier(lanes, "weights in", "weights out")
    host, slot = made(1), Slot(made(0))
    before = lanes.submit("states in", lambda: gate.wait(5), [])
    ready = carrier.fetch("key", Home([(0, host)]), slot, [before])
    assert not ready.done()
    gate.set()
    lanes.wait(ready)
    assert slot.buffer.tolist() == [1]
