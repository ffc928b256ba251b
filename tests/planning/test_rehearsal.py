"""What a rehearsal counts, against what is known by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrainer.memory.recompute import Keep, recompute_blocks
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss
from hybridtrainer.planning.arithmetic import arithmetic
from hybridtrainer.planning.pieces import without_memory
from hybridtrainer.planning.rehearsal import ROUNDING_BYTES, Ledger, Spent, rehearse

SIDE = 256
BYTES = SIDE * SIDE * 4


def matrix(requires_grad: bool = False) -> Tensor:
    return torch.empty(SIDE, SIDE, device="meta", requires_grad=requires_grad)


def test_what_is_there_before_is_not_counted_and_what_is_freed_counts_in_the_peak_only():
    weight = matrix()

    def work() -> Tensor:
        first = weight + 1
        second = first * 2
        del first
        third = second - 1
        del second
        return third

    spent = rehearse(work, [weight])
    assert (spent.peak_bytes, spent.left_bytes) == (2 * BYTES, BYTES)
    assert rehearse(work).peak_bytes == 2 * BYTES  # an input that nobody names is seen only where it is made


def test_views_and_changes_in_place_allocate_nothing():
    weight = matrix()

    def work() -> Tensor:
        made = weight.clone()
        made.view(-1)[: SIDE * 2].add_(1)
        return made.t().relu_()

    assert rehearse(work, [weight]).peak_bytes == BYTES


def test_what_a_reduction_takes_for_the_while_counts_in_the_peak_only():
    grad = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")
    spent = rehearse(lambda: grad.sum(0), [grad])
    assert (spent.peak_bytes, spent.left_bytes) == ((32 << 20) + 2048, 2048)


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_norms_of_16_bits_are_computed_in_32_under_autocast(norm):
    module = norm(SIDE, device="meta", dtype=torch.bfloat16)
    x = torch.empty(SIDE, SIDE, dtype=torch.bfloat16, device="meta", requires_grad=True)
    results = []
    for precision in ("fp32", "bf16", "fp16"):
        kept: list[Tensor] = []

        def work(precision: str = precision, kept: list[Tensor] = kept) -> None:
            with arithmetic(precision):
                kept.append(module(x))

        spent = rehearse(work, [x, *module.parameters()])
        results.append((kept[0].dtype, spent.left_bytes // (BYTES // 2)))  # in multiples of the 16-bit input
    assert results == [(torch.bfloat16, 1), (torch.float32, 4), (torch.float32, 4)]  # a copy beside the result


def test_small_tensors_take_a_whole_unit_of_the_allocator():
    assert rehearse(lambda: torch.empty(1, device="meta")).left_bytes == ROUNDING_BYTES


def test_a_backward_pass_is_counted_with_what_was_kept_for_it():
    weight = matrix(requires_grad=True)

    def work() -> tuple[Tensor, ...]:
        hidden = (weight @ weight).tanh()  # tanh keeps its result
        return torch.autograd.grad(hidden.sum(), [weight])

    spent = rehearse(work, [weight])
    assert 3 * BYTES <= spent.peak_bytes <= 4 * BYTES + 4 * ROUNDING_BYTES
    assert spent.left_bytes == BYTES
    assert spent.flops == pytest.approx(3 * 2 * SIDE**3, rel=0.01)


def test_products_and_other_kernels_are_counted_apart():
    weight = matrix()
    product, sum_ = rehearse(lambda: weight @ weight, [weight]), rehearse(lambda: weight + weight, [weight])
    assert (product.flops, product.product_bytes, product.other_bytes) == (2 * SIDE**3, 3 * BYTES, 0)
    assert (sum_.flops, sum_.product_bytes, sum_.other_bytes, sum_.kernels) == (0, 0, 3 * BYTES, 1)
    assert rehearse(weight.t, [weight]).kernels == 0


def test_attention_keeps_no_scores():
    time, heads, width = 2048, 4, 32
    q, k, v = (torch.empty(1, heads, time, width, device="meta", requires_grad=True) for _ in range(3))

    def work() -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out.sum(), [q, k, v])

    spent = rehearse(work, [q, k, v])
    scores = heads * time * time * 4
    assert spent.peak_bytes < scores / 4
    assert spent.flops == pytest.approx(3.5 * 2 * heads * time * time * width)


def test_a_norm_keeps_its_input_and_a_number_a_row():
    x = torch.empty(64, SIDE, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(SIDE, device="meta", dtype=torch.bfloat16, requires_grad=True)
    spent = rehearse(lambda: F.rms_norm(x, (SIDE,), weight, 1e-6), [x, weight])
    assert spent.left_bytes == 64 * SIDE * 2 + ROUNDING_BYTES


def test_what_a_loss_sends_to_a_device_or_makes_there_stays_without_memory():
    x = torch.empty(4, 4, device="meta")
    made: list[Tensor] = []

    def work() -> None:
        made.extend([x.to("cuda:0"), x.to(0), x.cuda(), x.cpu(), x.to(torch.device("cuda")), x.to(device="cuda")])
        made.extend([x.to("cuda", torch.float16, non_blocking=True), x.to(x.half()), x.to(torch.float16, True)])
        made.extend([torch.zeros(4, device="cuda"), torch.arange(4, device=torch.device("cuda", 0))])

    rehearse(work, [x])
    assert {tensor.device.type for tensor in made} == {"meta"}
    assert [tensor.dtype for tensor in made[6:9]] == [torch.float16] * 3


def test_what_a_loss_has_on_the_cpu_may_stay_there_or_come_along():
    x, constant = torch.empty(4, device="meta"), torch.tensor([1.0, 2.0, 3.0, 4.0])
    found: list[Tensor] = []

    def work() -> None:
        found.extend([x * constant.to(x.device), x * constant.to(x), x * constant.to("cuda"), x * constant.cuda()])
        found.append(x * constant.to("cuda", None, True))
        assert torch.zeros((), device="cpu").item() == 0
        assert constant.to("cpu").tolist() == constant.cpu().tolist() == [1.0, 2.0, 3.0, 4.0]
        assert x.to("cpu").device.type == "meta"

    rehearse(work, [x])
    assert {tensor.device.type for tensor in found} == {"meta"}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("every", "keep"), [(1, "products"), (2, "products"), (1, "inputs")])
def test_what_segments_keep_is_what_they_really_keep(every, keep, dtype):
    torch.manual_seed(0)
    model = GPT(GPTConfig("gpt2", 4, 128, 4, vocabulary=64, context=128))
    tokens = torch.randint(0, 64, (4, 129))
    planned = without_memory(model)
    for each in (model, planned):
        recompute_blocks(each, every, keep)
    with Ledger([*model.parameters(), tokens]) as ledger, torch.autocast("cpu", dtype, enabled=dtype is not None):
        kept = gpt_loss(model, tokens)
    really = ledger.spent().left_bytes
    del kept
    values = torch.empty_like(tokens, device="meta")

    def forward() -> Tensor:
        with arithmetic("fp32" if dtype is None else "bf16"):
            return gpt_loss(planned, values)

    assert rehearse(forward, [*planned.parameters(), values]).left_bytes == pytest.approx(really, rel=0.005)


def test_of_kept_products_none_is_counted_again_and_attention_with_dropout_is():
    def spent(every: int, keep: Keep, dropout: float) -> Spent:
        model = without_memory(GPT(GPTConfig("gpt2", 4, 128, 4, vocabulary=64, context=128, dropout=dropout)))
        tokens = torch.empty(4, 129, dtype=torch.long, device="meta")
        recompute_blocks(model, every, keep)
        return rehearse(lambda: gpt_loss(model, tokens).mean().backward(), [*model.parameters(), tokens])

    attention = 4 * 2 * 2 * 4 * 128 * 128 * 128 / 2  # in each of 4 blocks, in a batch of 4
    for dropout, again in ((0.0, 0.0), (0.1, attention)):
        plain, products, inputs = (
            spent(0, "inputs", dropout),
            spent(1, "products", dropout),
            spent(1, "inputs", dropout),
        )
        assert products.flops == plain.flops + again < inputs.flops
        assert plain.other_bytes < products.other_bytes <= inputs.other_bytes
        assert plain.kernels < products.kernels < inputs.kernels


@pytest.mark.parametrize(("is_part_of_a_product", "copies"), [(True, 0), (False, 1)])
def test_the_result_of_attention_is_laid_out_as_the_queries_are(is_part_of_a_product, copies):
    """As torch's kernels on a GPU do it: heads are joined again without a copy where they were split without one."""
    product = torch.empty(2, 64, 3 * 128, dtype=torch.bfloat16, device="meta")
    q, k, v = (part.unflatten(2, (4, 32)).transpose(1, 2) for part in product.split(128, dim=2))
    if not is_part_of_a_product:
        q = torch.empty(q.shape, dtype=q.dtype, device="meta")
    with torch.no_grad():
        spent = rehearse(
            lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 64, 128), [product, q]
        )
    assert spent.kernels == 1 + copies
