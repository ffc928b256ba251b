"""A loader that leaves samples out: the same batches whoever loads them, from any position, and none by accident."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtrainer.data.chosen import ROUND_BATCHES, ChosenLoader, make_loader
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.errors import DataError

COUNT, BATCH = 512, 4


class Knowing:
    """Chances that change with what was given, as a ledger's do: what came three times has a small one from then on."""

    def __init__(self) -> None:
        self.times: Counter[int] = Counter()
        self.asked: list[tuple[int, int]] = []

    def __call__(self, indices: Tensor, passed: int, taken: int) -> Tensor:
        assert taken <= passed
        self.asked.append((len(indices), passed))
        return torch.tensor([0.1 if self.times[index] >= 3 else 0.8 for index in indices.tolist()])

    def learn(self, loader: ChosenLoader) -> None:
        for batch in loader.given():
            self.times.update(batch.indices.tolist())


def run(loader: ChosenLoader, knowing: Knowing, batches: int) -> list[list[int]]:
    found: list[list[int]] = []
    while len(found) < batches:
        for batch in islice(loader, batches - len(found)):
            found.append(batch.tolist())
            knowing.learn(loader)
    return found


def make(workers: int = 0, **options: Any) -> tuple[ChosenLoader, Knowing]:
    knowing = Knowing()
    return ChosenLoader(list(range(COUNT)), BATCH, knowing, seed=3, workers=workers, **options), knowing


@pytest.mark.parametrize("count", [COUNT, COUNT + 3])
def test_with_certainty_every_sample_comes_once_in_a_pass_in_the_order_of_a_loader_that_gives_all(count):
    loader = ChosenLoader(list(range(count)), BATCH, lambda indices, *_: torch.ones(len(indices)), seed=3)
    plain = PositionedLoader(list(range(count)), BATCH, seed=3)
    for _ in range(3):
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in plain]
    assert loader.passed == loader.taken


def test_what_has_no_chance_never_comes_and_what_has_half_comes_half_as_often():
    def chances(indices: Tensor, *_: int) -> Tensor:
        return torch.tensor([0.0, 0.5, 1.0, 1.0])[indices % 4]

    loader = ChosenLoader(list(range(COUNT)), BATCH, chances, seed=3)
    found = Counter(int(sample) % 4 for _ in range(20) for batch in loader for sample in batch)
    assert not found[0]
    assert found[1] == pytest.approx(found[2] / 2, rel=0.1)
    assert found[2] == pytest.approx(found[3], rel=0.05)
    assert loader.taken / loader.passed == pytest.approx(2.5 / 4, rel=0.02)


def test_it_says_which_samples_each_batch_had():
    loader, _ = make()
    batches = [batch.tolist() for batch in islice(loader, 5)]
    assert [batch.indices.tolist() for batch in loader.given()] == batches
    assert loader.given() == []


def test_a_round_is_chosen_with_what_was_known_when_the_one_before_it_began():
    loader, knowing = make()
    in_a_round = COUNT // (8 * BATCH)
    asked_at: list[int] = []
    for number, _ in enumerate(islice(loader, 3 * in_a_round + 1)):
        if len(knowing.asked) > len(asked_at):
            asked_at += [number] * (len(knowing.asked) - len(asked_at))
        knowing.learn(loader)
    assert [at for at in dict.fromkeys(asked_at) if at] == [in_a_round, 2 * in_a_round, 3 * in_a_round]


@pytest.mark.parametrize("workers", [1, 3, 40])
def test_any_number_of_workers_gives_the_same_batches(workers):
    batches = 2 * COUNT // BATCH + 5 if workers == 3 else 40
    assert run(*make(workers), batches) == run(*make(), batches)


def test_from_any_position_the_same_batches_follow():
    loader, knowing = make()
    before = run(loader, knowing, 37)
    position, times = loader.position(), Counter(knowing.times)
    expected = run(loader, knowing, 300)
    assert expected != before

    other, other_knowing = make()
    run(other, other_knowing, 11)
    other_knowing.times = times
    other.restore(position)
    assert other.given() == []
    assert run(other, other_knowing, 300) == expected


def weights_given(loader: ChosenLoader, batches: int) -> list[Any]:
    given = [loader.given()[0].weights for _ in islice(loader, batches)]
    return [None if each is None else each.tolist() for each in given]


def by_index(indices: Tensor, *_: int) -> Tensor:
    return torch.where(indices % 4 == 0, 1.0, 0.25)


def test_weights_are_told_where_they_are_asked_for_from_any_position_and_for_any_number_of_workers():
    loader, worked, silent = (
        ChosenLoader(list(range(COUNT)), BATCH, by_index, weighs=weighs, workers=workers)
        for weighs, workers in ((True, 0), (True, 2), (False, 0))
    )
    before = weights_given(loader, 37)
    position = loader.position()
    expected = weights_given(loader, 60)
    loader.restore(position)
    assert weights_given(loader, 60) == expected
    assert weights_given(worked, 97) == before + expected
    assert weights_given(silent, 97) == [None] * 97
    assert loader.identity() != silent.identity()
    assert "weights" in position and "weights" not in silent.position()
    assert torch.equal(loader.position()["drawn"], silent.position()["drawn"])  # the same samples either way


def test_a_sample_that_comes_a_quarter_as_often_counts_four_times_as_much():
    loader = ChosenLoader(list(range(COUNT)), BATCH, by_index, weighs=True)
    total = {"frequent": 0.0, "all": 0.0}
    for _ in range(8):
        for _ in loader:
            (given,) = loader.given()
            assert given.weights is not None
            frequent = (given.indices % 4 == 0).float()
            weights = given.weights * torch.where(frequent.bool(), 4, 1)
            assert torch.allclose(weights, weights[0].expand(BATCH))
            total["frequent"] += float(given.weights @ frequent)
            total["all"] += float(given.weights.sum())
    assert total["frequent"] / total["all"] == pytest.approx(0.25, abs=0.02)  # as many as they are
    assert total["all"] / (8 * COUNT) == pytest.approx(1, abs=0.03)


def test_where_whatever_passes_by_is_taken_it_counts_as_usual():
    never = ChosenLoader(list(range(COUNT)), BATCH, lambda indices, *_: torch.zeros(len(indices)), weighs=True)
    assert weights_given(never, 3) == [[1.0] * BATCH] * 3


def test_an_iteration_goes_on_from_where_it_is_put():
    loader, knowing = make()
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    position = loader.position()
    expected = [next(iterator).tolist() for _ in range(9)]
    loader.restore(position)
    assert [next(iterator).tolist() for _ in range(9)] == expected
    assert knowing.times == Counter()


@pytest.mark.parametrize(("samples", "batch"), [(4, 4), (5, 4), (64, 8), (100_000, 8)])
def test_a_round_is_a_small_part_of_the_data_and_at_least_one_batch(samples, batch):
    loader = ChosenLoader(range(samples), batch, lambda indices, *_: torch.full((len(indices),), 0.3))
    for number, found in enumerate(islice(loader, 3)):
        assert len(found) == batch
        assert number < len(loader)
    assert loader.position()["drawn"].shape[1] <= ROUND_BATCHES * batch


def test_chances_make_the_difference():
    assert type(make_loader(list(range(8)), 2, None)) is PositionedLoader
    assert type(make_loader(list(range(8)), 2, lambda indices, *_: torch.ones(len(indices)))) is ChosenLoader
    assert make_loader(list(range(8)), 2, None).identity() != make()[0].identity()
    assert make_loader(list(range(8)), 2, None).given() == []


def test_where_nobody_has_a_chance_a_round_is_full_nevertheless():
    loader = ChosenLoader(list(range(COUNT)), BATCH, lambda indices, *_: torch.zeros(len(indices)), seed=3)
    assert len([batch for batch in islice(loader, 20) if len(batch) == BATCH]) == 20


def test_iterations_that_come_too_far_apart_are_refused():
    loader, _ = make()
    early = iter(loader)
    next(early)
    list(loader)
    list(loader)
    with pytest.raises(DataError, match="too far apart"):
        list(islice(early, 3))


def test_a_last_batch_that_is_not_full_is_refused():
    with pytest.raises(DataError, match="keep_partial"):
        ChosenLoader(list(range(10)), 4, lambda indices, *_: torch.ones(len(indices)), keep_partial=True)
