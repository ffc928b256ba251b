"""Snapshots: exact, independent of what was copied, and made again without new memory."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support import SETUPS
from torch import Tensor

from hybridtrainer.predict.rollback import Snapshot
from hybridtrainer.state import Training, capture, restore
from hybridtrainer.tree import fingerprint, pack

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip


def tensors_of(snapshot: Snapshot) -> dict[str, Tensor]:
    return pack(snapshot.tree())[0]


def in_the_same_place(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(tensor.data_ptr() == b[name].data_ptr() for name, tensor in a.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_snapshot_is_exact_for_every_type_and_independent_of_the_original(dtype):
    torch.manual_seed(0)
    values = (torch.randn(5, 6) * 20).to(dtype)
    tree = {
        "a": values,
        "b": [values[::2].t(), values[0, 0], values[:0]],
        "step": 3,
        "best": math.inf,
        "pair": (1, None),
    }
    before = fingerprint(tree)
    snapshot = Snapshot()
    snapshot.take(tree)
    assert fingerprint(snapshot.tree()) == before
    values.zero_()
    assert fingerprint(snapshot.tree()) == before


def test_not_a_number_keeps_its_bits():
    odd = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000 + 0], dtype=torch.int32).view(torch.float32)
    snapshot = Snapshot()
    snapshot.take({"w": odd})
    assert torch.equal(snapshot.tree()["w"].view(torch.int32), odd.view(torch.int32))


def test_taking_again_overwrites_and_allocates_nothing():
    snapshot, weights = Snapshot(), torch.ones(1000)
    snapshot.take({"w": weights, "m": {"b": weights.half()}, "step": 1})
    first, held = tensors_of(snapshot), snapshot.nbytes()  # kept alive, so that its place cannot be given out again
    for step in range(2, 5):
        weights += 1
        snapshot.take({"w": weights, "m": {"b": weights.half()}, "step": step})
        assert snapshot.tree()["step"] == step
        assert torch.equal(snapshot.tree()["w"], weights)
    assert in_the_same_place(tensors_of(snapshot), first)
    assert snapshot.nbytes() == held
    assert snapshot.copies == 4


def test_dropping_forgets_the_state_and_keeps_the_memory():
    snapshot, weights = Snapshot(), torch.ones(1000)
    assert not snapshot.taken
    snapshot.take({"w": weights})
    assert snapshot.taken
    first, held = tensors_of(snapshot), snapshot.nbytes()
    snapshot.drop()
    assert not snapshot.taken
    assert snapshot.nbytes() == held
    snapshot.take({"w": weights})
    assert in_the_same_place(tensors_of(snapshot), first)


def test_a_tree_of_another_shape_is_taken_as_well():
    snapshot = Snapshot()
    snapshot.take({"w": torch.ones(3)})
    snapshot.take({"w": torch.ones(4), "v": torch.zeros(2, dtype=torch.bool)})
    assert snapshot.tree()["w"].tolist() == [1, 1, 1, 1]
    assert snapshot.tree()["v"].tolist() == [False, False]


@pytest.mark.parametrize("model", ["gpt", "cnn"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "adafactor"])
def test_a_whole_training_state_returns_bit_for_bit(model, optimizer):
    setup = SETUPS[model](optimizer, count=8)
    training = Training(setup.model, setup.optimizer, None, None)

    def train(batches: list[Tensor]) -> None:
        for batch in batches:
            setup.loss_fn(setup.model, batch).mean().backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()

    train(setup.batches[:3])
    snapshot = Snapshot()
    snapshot.take(capture(training))
    before = fingerprint(capture(training))
    train(setup.batches[3:6])
    after = fingerprint(capture(training))
    assert after["parameters"] != before["parameters"] and after["optimizer"] != before["optimizer"]
    restore(training, snapshot.tree())
    assert fingerprint(capture(training)) == before
    train(setup.batches[3:6])
    assert fingerprint(capture(training)) == after


def test_a_snapshot_that_does_not_fit_is_none(monkeypatch):
    snapshot = Snapshot()
    assert snapshot.take_if_it_fits({"w": torch.ones(2)}) == "" and snapshot.taken

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr("hybridtrainer.weights.HostCopy.take", out_of_memory)
    assert snapshot.take_if_it_fits({"w": torch.ones(2)}) == "GPU memory ran out in the snapshot"
    assert not snapshot.taken
