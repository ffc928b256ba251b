"""Arguments and results of blocks, taken apart, divided by samples, and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.calls import Call, Result, in_chunks, samples_of

BATCH, TIME, WIDTH = 4, 6, 3


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def test_nested_arguments_come_back_as_they_were():
    x, mask, cos, sin = (torch.randn(2) for _ in range(4))
    args = (x, None, {"mask": mask, "flags": (True, "causal")})
    kwargs = {"position_embeddings": (cos, sin), "use_cache": False, "scale": 0.5, "empty": []}
    call, tensors = Call.of(args, kwargs)
    assert [id(tensor) for tensor in tensors] == [id(x), id(mask), id(cos), id(sin)]
    assert not any(isinstance(leaf, Tensor) for leaf in call.leaves)  # a call that is kept must keep no tensor alive
    found_args, found_kwargs = call.arguments(tensors)
    assert found_args[1:2] == (None,)
    assert found_args[2]["flags"] == (True, "causal")
    assert found_args[0] is x and found_args[2]["mask"] is mask
    assert found_kwargs["position_embeddings"][0] is cos and found_kwargs["position_embeddings"][1] is sin
    assert list(found_kwargs) == list(kwargs)
    assert {key: found_kwargs[key] for key in ("use_cache", "scale", "empty")} == {
        "use_cache": False, "scale": 0.5, "empty": [],
    }  # fmt: skip


def test_other_tensors_take_the_places():
    call, _ = Call.of((torch.zeros(1), 3), {"mask": torch.zeros(1)})
    hidden, mask = torch.ones(5), torch.ones(7)
    args, kwargs = call.arguments([hidden, mask])
    assert args[0] is hidden and args[1] == 3 and kwargs["mask"] is mask
    with pytest.raises(ValueError):
        call.arguments([hidden])


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: a,
        lambda a, b: (a,),
        lambda a, b: (a, None, b),
        lambda a, b: [a, {"aux": b}],
        lambda a, b: {"hidden": a, "aux": b, "name": "block"},
    ],
    ids=["tensor", "tuple of one", "tuple", "list", "dict"],
)
def test_a_result_of_any_kind_comes_back_with_new_tensors(make):
    result, tensors = Result.of(make(torch.zeros(2), torch.zeros(3)))
    fresh = [torch.full_like(tensor, number) for number, tensor in enumerate(tensors)]
    found, expected = result.value(fresh), make(torch.zeros(2), torch.ones(3))
    assert type(found) is type(expected)
    assert _plain(found) == _plain(expected)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def test_samples_are_the_length_of_the_hidden_state():
    assert samples_of([numbered(BATCH, TIME, WIDTH), numbered(9)]) == BATCH
    assert samples_of([torch.tensor(1.0)]) == 1
    assert samples_of([]) == 1


def test_a_batch_that_is_computed_at_once_is_passed_on_untouched():
    tensors = [numbered(BATCH, TIME, WIDTH), numbered(TIME, TIME)]
    for chunk in (BATCH, BATCH + 1):
        (piece,) = in_chunks(tensors, chunk)
        assert [id(tensor) for tensor in piece] == [id(tensor) for tensor in tensors]
    (nothing,) = in_chunks([], 1)
    assert nothing == []


def test_the_last_chunk_has_what_is_left():
    pieces = list(in_chunks([numbered(5, 2)], 2))
    assert [len(piece[0]) for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece[0] for piece in pieces]), numbered(5, 2))


DIVIDED = {
    "mask of samples": (BATCH, 1, TIME, TIME),
    "position ids": (BATCH, TIME),
    "per sample": (BATCH,),
    "rotary angles of samples": (BATCH, TIME, WIDTH),
}
WHOLE = {
    "mask for all": (1, 1, TIME, TIME),
    "square mask": (TIME, TIME),
    "position ids for all": (1, TIME),
    "rotary angles for all": (1, TIME, WIDTH),
    "positions": (TIME,),
    "scalar": (),
}


@pytest.mark.parametrize("shape", DIVIDED.values(), ids=DIVIDED)
def test_what_belongs_to_samples_is_divided_with_them(shape):
    other = numbered(*shape)
    pieces = list(in_chunks([numbered(BATCH, TIME, WIDTH), other], 3))
    assert torch.equal(pieces[0][1], other[:3])
    assert torch.equal(pieces[1][1], other[3:])


@pytest.mark.parametrize("shape", WHOLE.values(), ids=WHOLE)
def test_what_has_no_samples_goes_to_every_chunk_whole(shape):
    other = numbered(*shape)
    pieces = list(in_chunks([numbered(BATCH, TIME, WIDTH), other], 3))
    assert [len(piece[0]) for piece in pieces] == [3, 1]
    assert all(piece[1] is other for piece in pieces)


@pytest.mark.parametrize("shape", [(4, 4), (4, 7), (4,)])
def test_what_may_belong_to_samples_or_to_positions_is_refused(shape):
    hidden = torch.zeros(4, 4, 8)
    assert len(list(in_chunks([hidden, torch.zeros(4, 1, 4, 4)], 2))) == 2
    with pytest.raises(ModelError, match="may be either"):
        list(in_chunks([hidden, torch.zeros(shape)], 2))
    assert len(list(in_chunks([hidden, torch.zeros(shape)], 4))) == 1  # nothing is divided


def test_a_hidden_state_without_time_may_be_square():
    pieces = list(in_chunks([numbered(4, 4), numbered(4, 4)], 2))
    assert [[len(tensor) for tensor in piece] for piece in pieces] == [[2, 2], [2, 2]]
