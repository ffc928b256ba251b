"""Whether a batch can be divided is tried before it is: what would be another result in parts is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.memory.support import DEVICES
from torch import Tensor, nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.memory.body import Body
from hybridtrainer.memory.calls import Call
from hybridtrainer.memory.division import Division
from hybridtrainer.memory.post_mortem import place_of
from hybridtrainer.memory.stream import stream

SAMPLES, TIME, WIDTH = 6, 5, 4


class Block(nn.Module):
    """Mixes within a sample, drops, and counts how often it is evaluated."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self.training:
            self.calls.add_(1)
        self.seen.append(len(x))
        x = x + self.drop(self.linear(x)).cumsum(1)
        return x if bias is None else x + bias


class OverSamples(Block):
    """Looks at its neighbours, as attention with time first does."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().forward(x) + 0.1 * x.mean(0, keepdim=True)


class OverEarlier(Block):
    """Looks at those before it alone."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().forward(x) + 0.1 * x.cumsum(0)


class OverAlike(Block):
    """Looks at those that are like it alone."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        each = nn.functional.layer_norm(x, [WIDTH]).transpose(0, 1)
        return super().forward(x) + ((4 * each @ each.transpose(1, 2)).softmax(-1) @ each).transpose(0, 1)


class ByNumber(Block):
    """Only their number matters."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().forward(x) / len(x)


class Heads(Block):
    """A bias for each of as many heads as there are samples; for one head it would be that of all."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is not None
        return super().forward(x) + (x.unsqueeze(1) * bias[None]).sum(1)


def divide(block: nn.Module, *tensors: Tensor, chunk: int = 3, division: Division | None = None) -> list[Tensor]:
    body = Body(block, [name for name, _ in block.named_parameters()], division)
    call, found = Call.of(tensors, {})
    return body.forward([each.detach() for each in block.parameters()], call, found, chunk)[1]


def hidden(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SAMPLES, TIME, WIDTH, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@pytest.mark.parametrize("kind", [OverSamples, OverEarlier, OverAlike, ByNumber])
def test_a_block_that_looks_at_other_samples_is_not_divided(kind):
    assert len(divide(kind(), hidden(), chunk=SAMPLES)[0]) == SAMPLES
    with pytest.raises(ModelError, match=r"others are not beside it.*`memory.split = 1`"):
        divide(kind(), hidden())


def test_gradients_are_not_divided_either():
    block = OverSamples()
    body = Body(block, ["linear.weight", "linear.bias"])
    call, tensors = Call.of((hidden(),), {})
    weights = [each.detach() for each in block.parameters()]
    with pytest.raises(ModelError, match="others are not beside it"):
        body.gradients(weights, [True, True], call, tensors, [True], [hidden()], 2)


@pytest.mark.parametrize("heads", [SAMPLES, 2])
def test_a_tensor_that_has_as_many_heads_as_there_are_samples_is_not_taken_apart(heads):
    x = hidden()[:heads]
    bias = torch.arange(1.0, heads + 1)[:, None, None].expand(heads, TIME, WIDTH)
    with pytest.raises(ModelError):
        divide(Heads(), x, bias, chunk=1)


def test_a_block_that_cannot_be_computed_for_fewer_samples_says_so():
    class Grouped(Block):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().forward(x) + x.view(3, -1, WIDTH).repeat(1, 1, 1).view(x.shape)

    with pytest.raises(ModelError, match="cannot compute 2 of 6 samples alone: RuntimeError") as raised:
        divide(Grouped(), hidden())
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_that_can_be_divided_is_tried_once_and_left_as_it_was(device, dtype):
    block, division = Block().to(device, dtype), Division()
    x, bias = hidden(device, dtype), torch.randn(SAMPLES, 1, WIDTH, device=device, dtype=dtype)
    torch.manual_seed(4)
    expected = torch.cat([block(part, other) for part, other in zip(x.split(4), bias.split(4), strict=True)])
    numbers, block.seen = torch.rand(3), []
    torch.manual_seed(4)
    calls = block.calls
    (found,) = divide(block, x, bias, chunk=4, division=division)
    assert torch.equal(found, expected.detach())
    assert torch.equal(torch.rand(3), numbers)
    assert block.calls is calls and calls.item() == 0
    assert block.training and block.drop.training
    tried = len(block.seen) - 2
    assert tried and max(block.seen[:tried]) == 2
    block.seen = []
    divide(block, x, bias, chunk=4, division=division)
    assert block.seen == [4, 2]
    divide(block, x, chunk=4, division=division)  # another kind of call
    assert len(block.seen) > 4


def test_a_result_in_an_object_is_not_put_together_from_parts():
    class InObject(Block):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Any:
            return SimpleNamespace(hidden=super().forward(x))

    with pytest.raises(ModelError, match="returns a SimpleNamespace"):
        divide(InObject(), hidden())


def test_equal_samples_tell_nothing_and_the_next_call_is_tried():
    block, division = OverSamples(), Division()
    divide(block, hidden()[:1].expand(SAMPLES, TIME, WIDTH), division=division)
    with pytest.raises(ModelError, match="others are not beside it"):
        divide(block, hidden(), division=division)


def test_where_two_samples_do_not_fit_one_is_computed_at_a_time():
    class Hungry(Block):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            if len(x) > 1:
                raise torch.OutOfMemoryError("injected")
            return super().forward(x)

    assert len(divide(Hungry().eval(), hidden(), chunk=1)[0]) == SAMPLES


class TimeFirst(nn.Module):
    """Torch's own encoder layers as they are by default."""

    def __init__(self, limit: int = 99) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Limited(limit) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Limited(nn.TransformerEncoderLayer):
    """Has no memory for more."""

    def __init__(self, limit: int) -> None:
        super().__init__(WIDTH, 2, 8, dropout=0.0)
        self.limit = limit

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(src) > self.limit:
            raise torch.OutOfMemoryError("injected")
        return super().forward(src, *args, **kwargs)


def test_time_first_is_refused_with_split_and_explained_where_memory_runs_out():
    memory = MemoryConfig(mode="fp32")
    model = stream(TimeFirst(), MemoryConfig(mode="fp32", split=2), "cpu")
    with pytest.raises(ModelError, match=r"`memory.split = 1`"):
        model(hidden())
    small = stream(TimeFirst(limit=3), memory, "cpu")
    with pytest.warns(UserWarning, match="ran out"), pytest.raises(torch.OutOfMemoryError) as raised:
        small(hidden())
    place: Any = place_of(raised.value)
    assert "cannot be divided: A block computes another result" in place.note
    assert "memory.offload_activations" in place.note
