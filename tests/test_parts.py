"""Dividing a batch, and finding out what its parts count by."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtrainer.parts import TOLERANCE, divide, find_weighing, may_differ, shares

Pair = namedtuple("Pair", ["x", "y"])
X, Y = torch.arange(10).view(5, 2), torch.arange(5)


def parts_of(batch: Any, parts: int) -> list[Any]:
    found = divide(batch, parts)
    assert isinstance(found, list)
    return found


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping with an attribute of its own, as those of Hugging Face have."""

    def __init__(self, data: Any, origin: str) -> None:
        super().__init__(data)
        self.origin = origin


def test_every_tensor_is_divided_and_nothing_is_lost():
    whole = {"x": X, "pair": (Y, [Y, None]), "names": list("abcde"), "scale": 2.0, "zero": torch.tensor(3)}
    parts = parts_of(whole, 2)
    assert [len(part["x"]) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part["x"] for part in parts]), X)
    assert torch.equal(torch.cat([part["pair"][1][0] for part in parts]), Y)
    assert [part["names"] for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert all(part["scale"] == 2.0 and part["zero"] == 3 and part["pair"][1][1] is None for part in parts)
    assert parts[0]["x"].untyped_storage().data_ptr() == X.untyped_storage().data_ptr()  # no copy


def test_more_parts_than_samples_are_one_sample_each():
    assert [part.tolist() for part in parts_of(Y, 8)] == [[0], [1], [2], [3], [4]]


def test_types_of_batches_stay():
    assert isinstance(parts_of(Pair(X, Y), 2)[0], Pair)
    encoding = Encoding({"x": X}, "here")
    first = parts_of(encoding, 2)[0]
    assert isinstance(first, Encoding) and first.origin == "here" and len(first["x"]) == 3
    assert len(encoding["x"]) == 5


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ((X, torch.zeros(1, 2)), "a tensor of 1 stands beside one of 5"),
        ({"x": X, "graph": object()}, "it has a object in it"),
        ((X, ["a", "b"]), "2 values stand beside 5 samples"),
    ],
)
def test_what_cannot_be_divided_says_why(batch, why):
    assert divide(batch, 2) == why


def labelled(*valid: int) -> Tensor:
    labels = torch.full((len(valid), 8), -100)
    for row, count in enumerate(valid):
        labels[row, :count] = 1
    return labels


def test_shares_follow_samples_or_targets():
    whole = {"input_ids": torch.ones(3, 8, dtype=torch.long), "labels": labelled(8, 4, 2)}
    parts = parts_of(whole, 2)
    assert shares(parts, "samples") == [2 / 3, 1 / 3]
    assert shares(parts, "targets") == [12 / 14, 2 / 14]
    assert shares(parts, "next targets") == [10 / 11, 1 / 11]
    full = parts_of({"labels": labelled(8, 8, 8)}, 2)
    assert shares(full, "targets") == [2 / 3, 1 / 3]
    assert may_differ(parts) and not may_differ(full)
    # One part without a masked target, one with nothing else.
    assert shares([labelled(8, 8), labelled(0, 0)], "targets") == [1.0, 0.0]


LOSSES = {
    "samples": lambda batch: batch["values"].mean(),
    "targets": lambda batch: batch["values"].repeat_interleave(8).view(-1, 8)[batch["labels"] != -100].mean(),
    "next targets": lambda batch: (
        batch["values"].repeat_interleave(7).view(-1, 7)[batch["labels"][:, 1:] != -100].mean()
    ),
    None: lambda batch: batch["values"].sum(),
}


@pytest.mark.parametrize("expected", list(LOSSES))
def test_the_weighing_of_a_loss_is_found_by_measuring(expected):
    batch = {"values": torch.tensor([1.0, 5.0, 2.0, 9.0]), "labels": labelled(8, 4, 2, 5)}
    assert find_weighing(batch, parts_of(batch, 2), lambda part: float(LOSSES[expected](part)), TOLERANCE) == expected


def test_a_loss_that_compares_samples_has_no_weighing():
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def contrastive(part: Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(part @ part.T, torch.arange(len(part))))

    assert find_weighing(batch, parts_of(batch, 2), contrastive, TOLERANCE) is None
