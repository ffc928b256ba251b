"""Results of products that are kept in a segment: the same bits, none computed again, and nothing kept too long."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.memory.support import DEVICES, LLAMA, SMALL, build, deterministic
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hybridtrainer.memory.products import _is_product, with_products_kept
from hybridtrainer.memory.recompute import Keep, checkpointed, recompute_blocks
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss
from hybridtrainer.planning.rehearsal import Ledger

TOKENS = torch.randint(0, 96, (4, 17), generator=torch.Generator().manual_seed(1))
_aten = torch.ops.aten
WAYS: tuple[tuple[int, Keep], ...] = ((0, "inputs"), (1, "products"), (1, "inputs"))


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def gradients(model: nn.Module, dtype: torch.dtype | None = None, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(3)
    with deterministic():
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = gpt_loss(model, TOKENS.to(device)).mean()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=["gpt2, tied, with dropout", "llama"])
@pytest.mark.parametrize("every", [1, 3])
def test_results_are_the_same_bits(every, shape, dtype, device):
    model = build(shape).to(device)
    expected = gradients(model, dtype, device)
    recompute_blocks(model, every, "products")
    assert equal(gradients(model, dtype, device), expected)


def without_dropout() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig("gpt2", 4, 64, 4, vocabulary=96, context=16))


def test_no_product_and_no_attention_is_computed_again():
    model, calls = without_dropout(), {}
    for every, keep in WAYS:
        recompute_blocks(model, every, keep)
        with Counted() as counted:
            gradients(model)
        calls[every, keep] = counted.calls
    attention = next(packet for packet in calls[0, "inputs"] if packet.__name__.startswith("_scaled_dot_product"))
    for packet, again in ((_aten.addmm, 3 * 4), (attention, 4), (_aten.native_layer_norm, 2 * 4)):
        plain, products, inputs = (found[packet] for found in calls.values())
        assert inputs == plain + again  # of a block all but the last product: nothing after it is needed
        assert products == (inputs if packet is _aten.native_layer_norm else plain)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_more_is_kept_than_inputs_and_less_than_all(shape, dtype):
    model, kept = build(shape), []
    for every, keep in WAYS:
        recompute_blocks(model, every, keep)
        with Ledger(model.parameters()) as ledger, torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = gpt_loss(model, TOKENS)
        gc.collect()
        kept.append(ledger.spent().left_bytes)
        del loss
    everything, products, inputs = kept
    assert 1.5 * inputs < products < 0.75 * everything


def test_the_last_product_is_not_kept_where_it_is_only_added():
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def left(then: Any) -> int:
        with Ledger([weight, x]) as ledger:
            out = checkpointed(with_products_kept(lambda x: then(x.sin() @ weight)), x)
        found: int = ledger.spent().left_bytes
        del out
        return found

    assert left(lambda product: x + product) == weight.nbytes  # what it returns
    assert left(lambda product: product.exp()) == 2 * weight.nbytes


def test_what_is_kept_is_freed_with_its_graph():
    model = without_dropout()
    recompute_blocks(model, 1, "products")
    with Ledger([*model.parameters(), TOKENS]) as ledger:
        gpt_loss(model, TOKENS)
        assert ledger.spent().left_bytes == 0
        gpt_loss(model, TOKENS).mean().backward()
    assert ledger.spent().left_bytes <= sum(parameter.nbytes + 512 for parameter in model.parameters())


def test_a_kept_result_is_given_out_once_and_held_no_longer():
    x = torch.ones(2, 2)
    run = with_products_kept(lambda: (x @ x).add(1).neg())
    for computed in (1, 0, 1):
        with Counted() as counted:
            assert torch.equal(run(), torch.full((2, 2), -3.0))
        assert counted.calls[_aten.mm] == computed


def test_after_an_error_in_a_segment_nothing_is_kept_any_more():
    x = torch.ones(2, 2, requires_grad=True)

    def segment(x: Tensor) -> Tensor:
        raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's") as caught:  # the error, and with it the frames, live on
        checkpointed(with_products_kept(segment), x)
    assert len(_get_current_dispatch_mode_stack()) == 0
    (gradient,) = torch.autograd.grad(x.exp().sum(), x)  # nothing of this is taken for a part of the segment
    assert torch.equal(gradient, x.exp())
    assert caught.value


@pytest.mark.parametrize(
    "work",
    [
        lambda linear, x: F.relu_(linear(x)).exp(),
        lambda linear, x: linear(x).mul_(3).sin().cos(),
        lambda linear, x: linear(linear(x).add_(1)).tanh(),
    ],
)
def test_a_result_that_was_changed_in_place_is_computed_again(work):
    torch.manual_seed(0)
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)

    def run(segment: Any) -> Any:
        return torch.autograd.grad(segment().square().sum(), list(linear.parameters()))

    expected = run(lambda: work(linear, x))
    again = run(lambda: checkpointed(with_products_kept(work), linear, x))
    assert equal(again, expected)


def test_a_weight_that_was_cast_before_the_segment_is_cast_again_in_it():
    torch.manual_seed(0)
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)

    def segment(x: Tensor) -> Tensor:
        out: Tensor = linear(x).sin()
        return out

    def run(second: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):  # it casts a weight once, until it is left
            out = second(segment(x))
        return torch.autograd.grad(out.float().sum(), list(linear.parameters()))

    kept = run(lambda x: checkpointed(with_products_kept(segment), x))
    assert equal(kept, run(segment))


def test_a_second_backward_pass_computes_what_was_given_out():
    model = without_dropout()
    weights = list(model.parameters())
    recompute_blocks(model, 1, "products")
    loss = gpt_loss(model, TOKENS).mean()
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    assert equal(torch.autograd.grad(loss, weights), first)


@pytest.mark.parametrize(
    ("kernel", "place"),
    [
        ("_scaled_dot_product_flash_attention", 3),
        ("_scaled_dot_product_flash_attention_for_cpu", 3),
        ("_scaled_dot_product_efficient_attention", 5),
        ("_scaled_dot_product_cudnn_attention", 5),
    ],
)
def test_attention_that_draws_random_numbers_is_computed_again(kernel, place):
    func = getattr(_aten, kernel).default
    given = [None] * place
    assert _is_product(func, given, {})
    assert _is_product(func, [*given, 0.0], {}) and not _is_product(func, [*given, 0.1], {})
    assert not _is_product(func, given, {"dropout_p": 0.1})
    assert not _is_product(_aten.native_dropout.default, [None, 0.1, True], {})
