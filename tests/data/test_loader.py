"""The loader: the same batches from any position, with any number of workers, and no trace in random states."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.errors import DataError
from hybridtrainer.randomness import RandomState
from hybridtrainer.tree import fingerprint


def stream(loader: PositionedLoader) -> Iterator[Any]:
    while True:
        yield from loader


def numbers(loader: PositionedLoader, count: int) -> list[list[int]]:
    batches = stream(loader)
    return [next(batches).tolist() for _ in range(count)]


def loader(samples: int = 20, batch_size: int = 3, **options: Any) -> PositionedLoader:
    return PositionedLoader(range(samples), batch_size, **options)


@settings(deadline=None, max_examples=40)
@given(
    samples=st.integers(1, 30),
    batch_size=st.integers(1, 8),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
    split=st.integers(0, 25),
)
def test_any_split_point_gives_the_same_remaining_batches(samples, batch_size, seed, shuffle, split):
    if samples < batch_size:
        samples, batch_size = batch_size, samples
    make = lambda: loader(samples, batch_size, seed=seed, shuffle=shuffle)  # noqa: E731
    whole = numbers(make(), split + 12)
    first, second = make(), make()
    assert numbers(first, split) == whole[:split]
    second.restore(first.position())
    assert second.position() == first.position()
    assert numbers(second, 12) == whole[split:]
    assert numbers(first, 12) == whole[split:]  # leaving an iteration and starting another loses nothing


def test_an_epoch_has_every_sample_at_most_once_and_leaves_out_less_than_a_batch():
    for epoch in (numbers(loader(20, 3), 6), numbers(loader(20, 3), 12)[6:]):
        drawn = [number for batch in epoch for number in batch]
        assert len(drawn) == len(set(drawn)) == 18
    assert len(loader(20, 3)) == 6
    assert len(list(loader(20, 3))) == 6


def test_epochs_and_seeds_differ_in_order():
    def orders(seed: int) -> list[list[list[int]]]:
        one = loader(40, 4, seed=seed)
        return [[batch.tolist() for batch in one] for _ in range(3)]

    seen = [str(order) for seed in (0, 1, 2) for order in orders(seed)]
    assert len(set(seen)) == 9  # also the second epoch of one seed is not the first of the next


def test_without_shuffling_samples_come_in_order():
    assert numbers(loader(7, 2, shuffle=False), 4) == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_the_position_counts_batches_and_epochs():
    one = loader(7, 3)
    assert one.position() == {"epoch": 0, "batch": 0}
    batches = iter(one)
    next(batches)
    assert one.position() == {"epoch": 0, "batch": 1}
    next(batches)
    assert one.position() == {"epoch": 0, "batch": 2}
    with pytest.raises(StopIteration):
        next(batches)
    next(iter(one))
    assert one.position() == {"epoch": 1, "batch": 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_winding_back_in_the_middle_of_an_iteration_repeats_the_batches(workers):
    one = loader(20, 3, workers=workers)
    batches = iter(one)
    first = [next(batches).tolist() for _ in range(2)]
    here = one.position()
    ahead = [next(batches).tolist() for _ in range(3)]
    one.restore(here)
    assert [next(batches).tolist() for _ in range(3)] == ahead
    one.restore({"epoch": 0, "batch": 0})
    assert [batch.tolist() for batch in batches][:5] == first + ahead
    assert one.position() == {"epoch": 0, "batch": 6}


def test_winding_back_after_the_last_batch_goes_on_from_there():
    one = loader(6, 3)
    batches = iter(one)
    both = [next(batches).tolist(), next(batches).tolist()]
    one.restore({"epoch": 0, "batch": 1})
    assert [batch.tolist() for batch in batches] == both[1:]


def test_going_to_another_epoch_in_the_middle_of_an_iteration_continues_there():
    one = loader(20, 3)
    expected = numbers(loader(20, 3), 12)
    batches = iter(one)
    next(batches)
    one.restore({"epoch": 1, "batch": 2})
    assert [batch.tolist() for batch in batches] == expected[8:]


class Drawing:
    """Draws from every generator for each sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), numpy.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class DrawingBatches(Drawing):
    """Does so for a whole batch at once."""

    def batch_of(self, indices: Sequence[int]) -> Tensor:
        return torch.stack([self[index] for index in indices])


class Silent(DrawingBatches):
    """Says that it draws nothing."""

    draws_nothing = True


class Loud(Silent):
    """Derived from one that says so, which says nothing about this one."""


@pytest.mark.parametrize("dataset", [Drawing(), DrawingBatches(), Loud()], ids=["samples", "batches", "derived"])
def test_random_samples_do_not_depend_on_workers_position_or_the_state_outside(dataset):
    def batches(workers: int, start: int = 0) -> list[Any]:
        torch.rand(1)
        one = PositionedLoader(dataset, 3, seed=1, workers=workers)
        one.restore({"epoch": 0, "batch": start})
        return [batch.tolist() for batch in one] + [batch.tolist() for batch in one]

    alone = batches(workers=0)
    assert batches(workers=0) == alone
    assert batches(workers=2) == alone
    assert batches(workers=2, start=2) == alone[2:]
    drawn = [number for batch in alone for sample in batch for number in sample[1:]]
    assert len(set(drawn)) == len(drawn)  # no two samples draw the same, nor do two generators


@pytest.mark.parametrize("dataset", [Drawing(), DrawingBatches()], ids=["samples", "batches"])
@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_leaves_the_random_state_outside_as_it_was(dataset, workers):
    before = fingerprint({"random": RandomState.capture().to_tree()})
    list(PositionedLoader(dataset, 3, workers=workers))
    assert fingerprint({"random": RandomState.capture().to_tree()}) == before


def test_for_a_data_set_that_draws_nothing_no_generator_is_touched(monkeypatch):
    def refuse() -> None:
        raise AssertionError("not needed")

    monkeypatch.setattr(RandomState, "capture", refuse)
    assert len(list(PositionedLoader(Silent(), 3))) == 4
    with pytest.raises(AssertionError, match="not needed"):
        list(PositionedLoader(Loud(), 3))


def test_a_data_set_may_build_whole_batches():
    class Squares:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> int:
            raise AssertionError("not needed")

        def batch_of(self, indices: Sequence[int]) -> list[int]:
            return [index**2 for index in indices]

    one = PositionedLoader(Squares(), 3, shuffle=False)
    assert list(one) == [[0, 1, 4], [9, 16, 25], [36, 49, 64]]
    assert list(PositionedLoader(Squares(), 3, shuffle=False, workers=2)) == [[0, 1, 4], [9, 16, 25], [36, 49, 64]]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_collated_as_torch_does_or_as_told(workers):
    pairs = [(i, {"x": float(i)}) for i in range(4)]
    ((indices, inner), _) = PositionedLoader(pairs, 2, shuffle=False, workers=workers)
    assert indices.tolist() == [0, 1]
    assert inner["x"].tolist() == [0.0, 1.0]
    assert list(PositionedLoader(pairs, 2, shuffle=False, workers=workers, collate=len)) == [2, 2]


def test_an_error_of_the_data_set_arrives_as_it_was_raised():
    class Broken(Drawing):
        def __getitem__(self, index: int) -> Tensor:
            raise KeyError("broken sample")

    with pytest.raises(KeyError, match="broken sample"):
        list(PositionedLoader(Broken(), 3))


def test_a_data_set_that_does_not_fill_a_batch_is_refused_with_both_numbers():
    with pytest.raises(DataError, match="has 3 samples and a batch needs 4"):
        loader(3, 4)
    with pytest.raises(DataError, match="has 0 samples"):
        loader(0, 1)
    assert len(loader(4, 4)) == 1


@pytest.mark.parametrize("size", [0, -2])
def test_an_impossible_batch_size_is_refused(size):
    with pytest.raises(DataError, match=f"batch size of {size}"):
        loader(3, size)


def test_the_identity_names_what_decides_the_batches_and_not_the_workers():
    ours = loader(20, 3, seed=5).identity()
    assert ours == loader(20, 3, seed=5, workers=2).identity()
    others = [
        loader(21, 3, seed=5), loader(20, 4, seed=5), loader(20, 3, seed=6), loader(20, 3, seed=5, shuffle=False)
    ]  # fmt: skip
    assert all(other.identity() != ours for other in others)


def test_a_connection_that_a_dying_worker_broke_is_followed_by_torchs_own_error(monkeypatch):
    def torchs_answer(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    def broken(*_: Any, **__: Any) -> Iterator[Any]:
        threading.Timer(0.05, signal.raise_signal, [signal.SIGCHLD]).start()
        raise ConnectionResetError("by peer")
        yield

    monkeypatch.setattr("hybridtrainer.data.loader.DataLoader", broken)
    before = signal.signal(signal.SIGCHLD, torchs_answer)
    try:
        with pytest.raises(RuntimeError, match="worker") as caught:
            next(iter(PositionedLoader(list(range(6)), 2, workers=1)))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert isinstance(caught.value.__context__, ConnectionResetError)
    monkeypatch.setattr("hybridtrainer.data.loader.OBITUARY_SECONDS", 0.0)
    monkeypatch.setattr(threading.Timer, "start", lambda timer: None)
    with pytest.raises(ConnectionResetError, match="by peer"):  # nobody died
        next(iter(PositionedLoader(list(range(6)), 2, workers=1)))
