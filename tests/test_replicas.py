"""Copies and shards, as far as one process can show them; two ranks do the rest in `tests/test_ranks.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer import ranks
from hybridtrainer.errors import ModelError
from hybridtrainer.replicas import Replicas, _alike, is_sharded, local, mean_, part_of, reshard, unwrapped


class Shard:
    """Looks like a part of a divided tensor: rank 1 of 3."""

    def __init__(self, part: Tensor) -> None:
        self.part = part
        self.device_mesh = self

    def to_local(self) -> Tensor:
        return self.part

    def size(self) -> int:
        return 3

    def get_local_rank(self) -> int:
        return 1


def test_a_tensor_that_is_not_divided_is_its_own_part():
    tensor = torch.arange(3.0)
    assert local(tensor) is tensor and part_of(tensor, tensor) is tensor
    model = nn.Linear(2, 2)
    assert unwrapped(model) is model and not is_sharded(model)
    reshard(model)


@pytest.mark.parametrize(("rows", "own"), [(7, [3, 4, 5]), (2, [1]), (1, [])])
def test_a_whole_tensor_is_divided_as_torch_divides_it(rows, own):
    whole = torch.arange(rows).view(rows, 1).expand(rows, 2).clone()
    like: object = Shard(torch.empty(len(own), 2))
    assert part_of(whole, like)[:, 0].tolist() == own  # type: ignore[arg-type]
    part = whole[: len(own)]
    assert part_of(part, like) is part  # type: ignore[arg-type]  # of this rank's own shape: taken as it is


def test_one_process_averages_nothing_and_waits_for_nobody():
    gradient = torch.tensor([1.0, 2.0])
    mean_([gradient])
    Replicas(nn.BatchNorm1d(2)).share_buffers_()
    assert gradient.tolist() == [1.0, 2.0]


def test_gradients_are_averaged_in_pieces_of_one_type():
    tensors = [torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(3), torch.zeros(2), torch.zeros(9)]
    groups = [[len(each) for each in group] for group in _alike(tensors, 6)]
    assert groups == [[3, 3], [2, 9], [4]]


def test_sixteen_bit_gradients_are_added_in_32_bits(monkeypatch):
    sent: list[torch.dtype] = []
    monkeypatch.setattr(ranks, "count", lambda: 2)

    def all_reduce(tensor: Tensor) -> None:
        sent.append(tensor.dtype)
        tensor.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    gradient = torch.full((2, 2), 0.5, dtype=torch.bfloat16)
    mean_([gradient])
    assert sent == [torch.float32] and gradient.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_sparse_gradients_are_refused():
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ModelError, match="sparse"):
        Replicas(model).presence(list(model.parameters()))
