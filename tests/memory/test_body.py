"""A block run with weights lent to it: its results and gradients are those of the module itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.memory.support import DEVICES
from torch import Tensor, nn

from hybridtrainer.memory.body import Body, Surroundings, get_random, set_random
from hybridtrainer.memory.calls import Call

CPU = torch.device("cpu")
SAMPLES = 5


class Block(nn.Module):
    """Some of everything: a tied weight, one that is not used, dropout, a mask, two results."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.idle = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        hidden = self.dropout(self.inner(self.first(x)))
        if mask is not None:
            hidden = hidden * mask
        return x + scale * self.tied(hidden), hidden.argmax(dim=-1)


def lent(block: nn.Module) -> tuple[Body, list[Tensor]]:
    """A body, and other weights than the block's own."""
    names = [name for name, _ in block.named_parameters()]
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(each.shape, generator=generator) for each in block.parameters()]
    return Body(block, names), weights


def filled(block: nn.Module, weights: list[Tensor]) -> nn.Module:
    with torch.no_grad():
        for parameter, weight in zip(block.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return block


def inputs(samples: int = SAMPLES) -> tuple[Call, list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(samples, 3, 4, generator=generator)
    mask = (torch.rand(1, 3, 1, generator=generator) > 0.3).float()
    return Call.of((x, mask), {"scale": 0.5})


def expected_gradients(
    block: nn.Module, weights: list[Tensor], grad: Tensor, call: Call, tensors: list[Tensor]
) -> list[Tensor]:
    filled(block, weights)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    args, kwargs = call.arguments(leaves)
    output = block(*args, **kwargs)[0]
    found = torch.autograd.grad(output, [*leaves, *block.parameters()], grad, allow_unused=True)
    wanted = [*leaves, *block.parameters()]
    return [torch.zeros_like(like) if each is None else each for each, like in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("chunk", [5, 2, 1])
def test_the_result_is_that_of_the_module_with_these_weights(chunk):
    block = Block()
    body, weights = lent(block)
    call, tensors = inputs()
    own = [parameter.clone() for parameter in block.parameters()]
    result, outputs = body.forward(weights, call, tensors, chunk)
    assert not outputs[0].requires_grad
    assert all(torch.equal(one, other) for one, other in zip(block.parameters(), own, strict=True))
    filled(block, weights)
    args, kwargs = call.arguments(tensors)
    value, indices = result.value(outputs)
    expected_value, expected_indices = block(*args, **kwargs)
    torch.testing.assert_close(value, expected_value, rtol=1e-6, atol=1e-6)
    assert torch.equal(indices, expected_indices)


@pytest.mark.parametrize("chunk", [5, 3, 1])
def test_gradients_are_those_of_the_module_itself(chunk):
    block = Block()
    body, weights = lent(block)
    call, tensors = inputs()
    grad = torch.randn(SAMPLES, 3, 4)
    of_inputs, of_weights = body.gradients(
        weights, [True] * len(weights), call, tensors, [True, True], [grad, None], chunk
    )
    found = [each for each in of_inputs if each is not None] + of_weights
    expected = expected_gradients(block, weights, grad, call, tensors)
    if chunk == SAMPLES:
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    idle = [name for name, _ in block.named_parameters()].index("idle")
    assert of_weights[idle].tolist() == [0, 0, 0]  # not used: nothing, but something to update with
    assert all(weight.grad is None and not weight.requires_grad for weight in weights)
    assert all(parameter.grad is None for parameter in block.parameters())


def test_only_what_needs_a_gradient_gets_one():
    block = Block()
    body, weights = lent(block)
    names = [name for name, _ in block.named_parameters()]
    call, tensors = inputs()
    grad = torch.randn(SAMPLES, 3, 4)
    trainable = [name == "inner.0.weight" for name in names]
    of_inputs, of_weights = body.gradients(weights, trainable, call, tensors, [False, True], [grad, None], 2)
    assert of_inputs[0] is None
    assert len(of_weights) == 1
    expected = expected_gradients(block, weights, grad, call, tensors)
    torch.testing.assert_close(of_inputs[1], expected[1], rtol=1e-4, atol=1e-5)  # summed: every chunk had all of it
    torch.testing.assert_close(of_weights[0], expected[2 + trainable.index(True)], rtol=1e-4, atol=1e-5)


def test_where_all_is_frozen_nothing_is_computed():
    block = Block()
    body, weights = lent(block)
    call, tensors = inputs()
    block.first.register_forward_hook(lambda *_: pytest.fail("the block was run"))
    found = body.gradients(weights, [False] * 4, call, tensors, [False, False], [torch.ones(SAMPLES, 3, 4), None], 1)
    assert found == ([None, None], [])


def test_the_gradients_of_several_chunks_are_summed_in_fp32():
    block = nn.Linear(1, 1, bias=False)
    body, weight = Body(block, ["weight"]), torch.ones(1, 1, dtype=torch.bfloat16)
    x = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    call, tensors = Call.of((x,), {})
    grads = [torch.ones(3, 1, dtype=torch.bfloat16)]
    _, (in_parts,) = body.gradients([weight], [True], call, tensors, [False], grads, 1)
    assert in_parts.dtype == torch.float32
    assert in_parts.item() == 258  # bf16 would have stayed at 256 both times
    _, (at_once,) = body.gradients([weight], [True], call, tensors, [False], grads, 3)
    assert at_once.dtype == torch.bfloat16


def test_parameters_are_put_back_even_if_forward_raises():
    class Failing(Block):
        def forward(self, *_: Any, **__: Any) -> Any:
            assert torch.equal(self.idle, weights[0])
            raise RuntimeError("a cosmic ray")

    block = Failing()
    body, weights = lent(block)
    own = dict(block.named_parameters(remove_duplicate=False))
    call, tensors = inputs()
    with pytest.raises(RuntimeError, match="cosmic"):
        body.forward(weights, call, tensors, 5)
    with pytest.raises(RuntimeError, match="cosmic"):
        body.gradients(weights, [True] * 4, call, tensors, [True, False], [torch.ones(SAMPLES, 3, 4), None], 5)
    found = dict(block.named_parameters(remove_duplicate=False))
    assert list(found) == list(own)
    assert all(found[name] is own[name] for name in own)


@pytest.mark.parametrize("device", DEVICES)
def test_a_recomputation_finds_the_same_random_numbers_and_leaves_none_used(device):
    place = torch.device(device)
    block = Block(dropout=0.5)
    body, weights = lent(block)
    weights = [weight.to(place) for weight in weights]
    call, tensors = inputs()
    tensors = [tensor.to(place) for tensor in tensors]
    torch.manual_seed(11)
    random = get_random(place)
    _, outputs = body.forward(weights, call, tensors, 2)
    surroundings = Surroundings.of(place, random, 2)
    assert surroundings.drew_random_numbers
    torch.rand(7, device=place)  # what comes between
    before = get_random(place)
    with surroundings.again(before):
        _, again = body.forward(weights, call, tensors, 2)
    assert torch.equal(again[0], outputs[0])
    assert torch.equal(get_random(place), before)
    _, other = body.forward(weights, call, tensors, 2)
    assert not torch.equal(other[0], outputs[0])  # the mask matters


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_drawn_on_the_cpu_are_repeated_on_every_device(device):
    place = torch.device(device)
    torch.manual_seed(11)
    random = get_random(place)
    drawn = torch.rand(4), torch.rand(4, device=place)
    surroundings = Surroundings.of(place, random, 1)
    with surroundings.again(get_random(place)):
        assert torch.equal(torch.rand(4), drawn[0])
        assert torch.equal(torch.rand(4, device=place), drawn[1])
    set_random(place, random)
    assert torch.equal(torch.rand(4), drawn[0])


def test_a_block_that_draws_nothing_is_known_as_such():
    random = get_random(CPU)
    assert not Surroundings.of(CPU, random, 1).drew_random_numbers


def test_random_numbers_go_on_even_if_the_recomputation_raises():
    surroundings = Surroundings.of(CPU, get_random(CPU), 1)
    torch.rand(3)
    before = get_random(CPU)
    with pytest.raises(RuntimeError, match="cosmic"), surroundings.again(before):
        torch.rand(5)
        raise RuntimeError("a cosmic ray")
    assert torch.equal(get_random(CPU), before)


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_is_repeated_as_it_was(enabled):
    with torch.autocast("cpu", torch.bfloat16, enabled):
        surroundings = Surroundings.of(CPU, get_random(CPU), 1)
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.autocast("cpu", torch.float16, not enabled), surroundings.again(get_random(CPU)):
        assert linear(x).dtype == (torch.bfloat16 if enabled else torch.float32)
    assert linear(x).dtype == torch.float32


@pytest.mark.parametrize("chunk", [3, 1])
def test_a_first_tensor_without_dimensions_is_computed_whole(chunk):
    class Scaled(nn.Module):
        def forward(self, scale: Tensor, x: Tensor) -> Tensor:
            return scale * x

    body, weights = Body(Scaled(), []), list[Tensor]()
    call, tensors = Call.of((torch.tensor(2.0), torch.ones(3, 1)), {})
    assert body.forward(weights, call, tensors, chunk)[1][0].tolist() == [[2.0]] * 3
    grads, _ = body.gradients(weights, [], call, tensors, [True, True], [torch.ones(3, 1)], chunk)
    assert [None if each is None else each.tolist() for each in grads] == [3.0, [[2.0]] * 3]
