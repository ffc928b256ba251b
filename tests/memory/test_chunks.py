"""How many samples a block computes at a time, and what happens when memory runs out."""

from __future__ import annotations

import warnings

import pytest
import torch

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.body import get_random
from hybridtrainer.memory.chunks import Chunks
from hybridtrainer.memory.post_mortem import place_of

CPU = torch.device("cpu")
DOING = "the forward pass of a block"


def hungry(fits: int, tried: list[int] | None = None):
    def work(chunk: int) -> tuple[int, float]:
        if tried is not None:
            tried.append(chunk)
        drawn = torch.rand(()).item()
        if chunk > fits:
            raise torch.OutOfMemoryError("injected")
        return chunk, drawn

    return work


@pytest.mark.parametrize(("samples", "split", "size"), [(8, 1, 8), (8, 3, 3), (8, 8, 1), (3, 8, 1), (1, 1, 1)])
def test_a_batch_is_divided_into_at_most_as_many_parts_as_asked(samples, split, size):
    assert Chunks(CPU, split).size(samples) == size
    assert -(-samples // size) <= split


def test_work_that_fits_is_done_once_without_a_word():
    chunks, tried = Chunks(CPU, 2), []  # type: ignore[var-annotated]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (done, _), chunk = chunks.attempt(4, True, get_random(CPU), hungry(4, tried), DOING)
    assert (done, chunk, tried, chunks.split) == (4, 4, [4], 2)


def test_work_that_does_not_fit_is_done_again_with_half_the_samples_until_it_does():
    chunks, tried = Chunks(CPU, 1), []  # type: ignore[var-annotated]
    with pytest.warns(UserWarning, match="GPU memory ran out") as told:
        (done, _), chunk = chunks.attempt(7, True, get_random(CPU), hungry(2, tried), DOING)
    assert (done, chunk, tried) == (2, 2, [7, 4, 2])
    assert "4 samples are computed at a time" in str(told[0].message)
    assert chunks.size(7) == 2  # the next block begins with what has worked


def test_each_attempt_draws_the_same_random_numbers():
    torch.manual_seed(3)
    (_, expected), _ = Chunks(CPU, 1).attempt(1, True, get_random(CPU), hungry(1), DOING)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="ran out"):
        (_, found), _ = Chunks(CPU, 1).attempt(8, True, get_random(CPU), hungry(1), DOING)
    assert found == expected
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize(
    ("chunk", "divisible", "advice"), [(1, True, "memory.offload_activations"), (8, False, "memory.split")]
)
def test_work_that_cannot_be_divided_raises_and_says_what_to_do(chunk, divisible, advice):
    chunks, tried = Chunks(CPU, 1), []  # type: ignore[var-annotated]
    with pytest.raises(torch.OutOfMemoryError, match="injected") as raised:
        chunks.attempt(chunk, divisible, get_random(CPU), hungry(0, tried), DOING)
    assert tried == [chunk]
    assert advice in raised.value.__notes__[0]
    place = place_of(raised.value)
    assert place is not None and place.doing == DOING
    assert chunks.split == 1


def test_work_that_may_not_be_divided_is_explained_once_memory_has_run_out():
    def work(chunk: int) -> int:
        if chunk > 4:
            raise torch.OutOfMemoryError("injected")
        raise ModelError("It looks at its neighbours.", "Use `memory.split = 1`.")

    chunks = Chunks(CPU, 1)
    with pytest.warns(UserWarning, match="ran out"), pytest.raises(torch.OutOfMemoryError) as raised:
        chunks.attempt(8, True, get_random(CPU), work, DOING)
    assert "cannot be divided: It looks at its neighbours)" in raised.value.__notes__[0]
    assert chunks.split == 1
    with pytest.raises(ModelError, match="split = 1"):  # it was to be divided from the start
        chunks.attempt(4, True, get_random(CPU), work, DOING)


def test_a_division_that_did_not_help_is_forgotten():
    chunks, tried = Chunks(CPU, 2), []  # type: ignore[var-annotated]
    with pytest.warns(UserWarning, match="ran out"), pytest.raises(torch.OutOfMemoryError):
        chunks.attempt(4, True, get_random(CPU), hungry(0, tried), DOING)
    assert tried == [4, 2, 1]
    assert chunks.split == 2  # what goes on from a checkpoint is divided as before, bit for bit


def test_other_errors_pass_through():
    def broken(_: int) -> None:
        raise KeyError("else")

    with pytest.raises(KeyError, match="else"):
        Chunks(CPU, 1).attempt(8, True, get_random(CPU), broken, DOING)


def test_before_a_batch_is_divided_what_only_saves_copies_is_given_up():
    room, tried = [True, True, False], []  # type: ignore[var-annotated]
    chunks = Chunks(CPU, 1, make_room=lambda: room.pop(0))
    with pytest.warns(UserWarning, match="one block less stays") as told:
        (done, _), chunk = chunks.attempt(8, True, get_random(CPU), hungry(4, tried), DOING)
    assert (done, chunk, tried) == (4, 4, [8, 8, 8, 4])
    assert len(told) == 3
    assert chunks.split == 2


def test_room_helps_what_cannot_be_divided():
    room = [True, False]
    tried: list[int] = []

    def work(chunk: int) -> int:
        tried.append(chunk)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("injected")
        return chunk

    with pytest.warns(UserWarning, match="one block less stays"):
        assert Chunks(CPU, 1, make_room=lambda: room.pop(0)).attempt(8, False, get_random(CPU), work, DOING) == (8, 8)
    assert tried == [8, 8]
