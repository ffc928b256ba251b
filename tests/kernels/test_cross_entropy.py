"""Head and loss in tiles equal the plain ones, in values and gradients, and never hold whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtrainer.errors import DataError, ModelError
from hybridtrainer.kernels import cross_entropy
from hybridtrainer.kernels.cross_entropy import head_loss, token_mean

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
WIDTH, VOCABULARY = 12, 37


class Case:
    """A head on random hidden states, some targets ignored."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, bias: bool = True, ignored: float = 0.2,
                 device: str = "cpu", width: int = WIDTH, vocabulary: int = VOCABULARY) -> None:  # fmt: skip
        torch.manual_seed(0)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.hidden = torch.randn(*shape, width).to(**options).requires_grad_()
        self.weight = (torch.randn(vocabulary, width) / 2).to(**options).requires_grad_()
        self.bias = torch.randn(vocabulary).to(**options).requires_grad_() if bias else None
        self.targets = torch.randint(vocabulary, shape).masked_fill(torch.rand(shape) < ignored, -100).to(device)
        self.slopes = torch.randn(shape).to(device)

    def inputs(self) -> list[Tensor]:
        return [self.hidden, self.weight] + ([] if self.bias is None else [self.bias])

    def tiled(self, **options: Any) -> Tensor:
        return head_loss(self.hidden, self.weight, self.targets, bias=self.bias, **options)

    def plain(self, wide: torch.dtype = torch.float32, **options: Any) -> Tensor:
        logits = F.linear(self.hidden, self.weight, self.bias).to(wide)
        flat = F.cross_entropy(logits.flatten(0, -2), self.targets.flatten(), reduction="none", **options)
        return flat.view(self.targets.shape)

    def gradients(self, losses: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(losses, self.inputs(), self.slopes.to(losses.dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0], ids=["all count", "some ignored", "all ignored"])
def test_losses_and_gradients_equal_the_plain_ones(device, label_smoothing, bias, ignored):
    case = Case(3, 7, bias=bias, ignored=ignored, device=device)
    tiled = case.tiled(tile_tokens=4, label_smoothing=label_smoothing)
    plain = case.plain(label_smoothing=label_smoothing)
    assert tiled.shape == case.targets.shape and tiled.dtype == torch.float32
    torch.testing.assert_close(tiled, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.gradients(tiled), case.gradients(plain), rtol=1e-5, atol=1e-5)
    assert bool((tiled[case.targets == -100] == 0).all())


@pytest.mark.parametrize("shape", [(1,), (), (5,), (2, 3, 4), (0,), (1024,), (1025,)])
@pytest.mark.parametrize("tile_tokens", [1, 3, 1024])
def test_any_number_of_tokens_goes_with_any_tile(shape, tile_tokens):
    case = Case(*shape)
    tiled = case.tiled(tile_tokens=tile_tokens)
    logits = F.linear(case.hidden, case.weight, case.bias).view(-1, VOCABULARY)
    plain = F.cross_entropy(logits, case.targets.flatten(), reduction="none").view(shape)
    torch.testing.assert_close(tiled, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.gradients(tiled), case.gradients(plain), rtol=1e-4, atol=1e-4)


def test_the_tile_changes_results_by_rounding_alone():
    case = Case(64, dtype=torch.float64)
    whole = case.tiled(tile_tokens=64, label_smoothing=0.1)
    expected = case.gradients(whole)
    for tile_tokens in (1, 7, 63, 1000):
        tiled = case.tiled(tile_tokens=tile_tokens, label_smoothing=0.1)
        torch.testing.assert_close(tiled, whole, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(case.gradients(tiled), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_gradients_equal_finite_differences(label_smoothing):
    case = Case(2, 3, dtype=torch.float64)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return head_loss(hidden, weight, case.targets, bias=bias, label_smoothing=label_smoothing, tile_tokens=4)

    assert torch.autograd.gradcheck(loss, tuple(case.inputs()))
    assert loss(*case.inputs()).dtype == torch.float64


@pytest.mark.parametrize("reduce", [token_mean, lambda losses, targets: losses.mean()], ids=["mean", "broadcast"])
def test_means_over_tokens_have_the_gradients_of_the_plain_mean(reduce):
    case = Case(3, 7, ignored=0.0 if reduce is not token_mean else 0.3)
    plain = F.cross_entropy(F.linear(*case.inputs()).flatten(0, 1), case.targets.flatten())
    tiled = reduce(case.tiled(), case.targets)
    torch.testing.assert_close(tiled, plain)
    torch.testing.assert_close(
        torch.autograd.grad(tiled, case.inputs()), torch.autograd.grad(plain, case.inputs()), rtol=1e-4, atol=1e-6
    )


def test_a_mean_over_no_tokens_is_nan_and_harms_no_weight():
    case = Case(5, ignored=1.0)
    mean = token_mean(case.tiled(), case.targets)
    assert mean.isnan()
    assert all(bool((gradient == 0).all()) for gradient in torch.autograd.grad(mean, case.inputs()))


def test_a_token_of_the_vocabulary_can_be_the_ignored_one():
    case = Case(4, 6, ignored=0.0)
    case.targets[:, ::2] = 3
    tiled, plain = case.tiled(ignore_index=3), case.plain(ignore_index=3)
    torch.testing.assert_close(tiled, plain)
    torch.testing.assert_close(case.gradients(tiled), case.gradients(plain), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(token_mean(tiled, case.targets, 3), plain.sum() / (case.targets != 3).sum())


def test_large_logits_neither_overflow_nor_lose_the_small_ones():
    case = Case(6, bias=False, ignored=0.0)
    with torch.no_grad():
        case.hidden.mul_(1e4)
    tiled, plain = case.tiled(), case.plain()
    assert bool(tiled.isfinite().all())
    torch.testing.assert_close(tiled, plain)
    torch.testing.assert_close(case.gradients(tiled), case.gradients(plain))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_inputs_give_wide_losses_and_gradients_in_their_own_type(dtype, device):
    case = Case(5, 9, dtype=dtype, device=device)
    tiled, plain = case.tiled(tile_tokens=16), case.plain()
    assert tiled.dtype == torch.float32
    torch.testing.assert_close(tiled, plain, rtol=1e-5, atol=1e-5)  # both from the same rounded logits
    for one, gradient, expected in zip(case.inputs(), case.gradients(tiled), case.gradients(plain), strict=True):
        assert gradient.dtype == one.dtype and gradient.shape == one.shape
        assert (gradient - expected).float().norm() < 0.01 * expected.float().norm()


@pytest.mark.parametrize("device", DEVICES)
def test_the_weights_gradient_in_bf16_is_summed_in_fp32(device):
    case = Case(2048, dtype=torch.bfloat16, bias=False, device=device)
    truth = Case(2048, dtype=torch.float64, bias=False, device=device)
    for one, exact in zip(case.inputs(), truth.inputs(), strict=True):
        exact.data.copy_(one.data)
    (expected,) = torch.autograd.grad(truth.plain(torch.float64).mean(), [truth.weight])

    def error(gradient: Tensor) -> float:
        return float((gradient.double() - expected).norm() / expected.norm())

    (tiled,) = torch.autograd.grad(case.tiled(tile_tokens=32).mean(), [case.weight])
    summed_in_bf16 = torch.zeros_like(case.weight)
    for hidden, targets in zip(case.hidden.split(32), case.targets.split(32), strict=True):
        part = F.cross_entropy(F.linear(hidden, case.weight).float(), targets, reduction="sum") / 2048
        summed_in_bf16 += torch.autograd.grad(part, [case.weight])[0]
    assert error(tiled) < 0.005  # half a unit in the last place is 0.002
    assert error(tiled) < error(summed_in_bf16) / 2


@pytest.mark.parametrize("device", DEVICES)
def test_an_autocast_around_it_sets_the_type_of_the_products_alone(device):
    case = Case(3, 8, device=device)
    half = Case(3, 8, dtype=torch.bfloat16, device=device)
    with torch.autocast(device, torch.bfloat16):
        tiled = case.tiled(tile_tokens=5)
        inside = case.gradients(tiled)
    torch.testing.assert_close(tiled, half.tiled(tile_tokens=5), rtol=0, atol=0)
    outside = case.gradients(case_under_autocast(case, device))
    for one, a, b in zip(case.inputs(), inside, outside, strict=True):
        assert a.dtype == one.dtype and torch.equal(a, b)
    plain = case.gradients(case.plain())
    assert all((a - b).norm() < 0.02 * b.norm() for a, b in zip(inside, plain, strict=True))
    with torch.autocast(
        device, torch.bfloat16
    ):  # which keeps casts of weights: one made without a gradient must not be
        case.tiled()
        assert F.linear(case.hidden.detach(), case.weight).requires_grad


def case_under_autocast(case: Case, device: str) -> Tensor:
    with torch.autocast(device, torch.bfloat16):
        return case.tiled(tile_tokens=5)


def test_backward_under_an_autocast_that_forward_had_not_computes_as_forward_did():
    case = Case(3, 8)
    losses = case.tiled()
    before = torch.autograd.grad(losses, case.inputs(), case.slopes, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        after = case.gradients(losses)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Watch(TorchDispatchMode):
    """Sees every tensor that is made, also inside forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products = 0
        self.shapes: list[tuple[int, ...]] = []  # of the matrices of each product together

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.products += 1
            self.shapes.append(tuple(size for one in args if isinstance(one, Tensor) for size in one.shape))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, Tensor):
                self.largest = max(self.largest, one.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whole_logits_never_exist(dtype):
    case = Case(4, 50, dtype=dtype, vocabulary=1000)
    with Watch() as plain:
        case.gradients(case.plain())
    with Watch() as tiled:
        case.gradients(case.tiled(tile_tokens=20, label_smoothing=0.1))
    assert plain.largest == 200 * 1000  # the watch sees them where they do exist
    assert tiled.largest == 20 * 1024  # a row is rounded up to the next multiple of 64


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("vocabulary", [64, 256, 1088])
def test_logits_of_a_vocabulary_of_whole_rows_are_those_of_the_head_bit_for_bit(vocabulary, dtype, bias):
    case = Case(20, dtype=dtype, bias=bias, vocabulary=vocabulary)
    settings = cross_entropy._Settings(-100, 0.0, 1024, dtype)
    with torch.no_grad():
        logits = cross_entropy._logits(case.hidden, case.weight, case.bias, vocabulary, settings)
        assert torch.equal(logits, F.linear(case.hidden, case.weight, case.bias).to(settings.wide))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_product_sees_a_vocabulary_of_whole_tiles(dtype, bias, device):
    case = Case(20, dtype=dtype, bias=bias, vocabulary=1001, device=device)
    with Watch() as watch:
        case.gradients(case.tiled())
    assert {max(shape) for shape in watch.shapes} == {1024}


def test_a_target_in_the_rest_of_a_row_is_found_where_targets_are_not_checked(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_check_targets", lambda *_: None)  # as on a GPU
    case = Case(3, 4)
    case.targets[1, 2] = VOCABULARY
    with pytest.raises(RuntimeError, match="out of bounds"):
        case.tiled()


def test_only_the_inputs_and_one_number_for_each_token_are_kept():
    case = Case(4, 50, dtype=torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):  # type: ignore[func-returns-value]
        case.tiled()
    inputs = {one.data_ptr() for one in (*case.inputs(), case.targets)}
    assert [one.numel() for one in kept if one.data_ptr() not in inputs] == [200]


@pytest.mark.parametrize(
    ("trained", "products"),
    [((True, True), 3), ((True, False), 2), ((False, True), 2), ((False, False), 0)],
    ids=["both", "head frozen", "body frozen", "both frozen"],
)
def test_only_gradients_that_are_needed_are_computed(trained, products):
    case = Case(10, ignored=0.0)
    case.hidden.requires_grad_(trained[0])
    case.weight.requires_grad_(trained[1])
    losses = case.tiled()
    with Watch() as watch:
        losses.sum().backward()  # the bias needs its own always
    assert watch.products == max(products, 1)
    assert (case.hidden.grad is not None, case.weight.grad is not None) == trained
    assert case.bias is not None and case.bias.grad is not None


def test_a_head_that_is_the_embedding_too_gets_the_sum_of_both_gradients():
    tokens = torch.randint(VOCABULARY, (3, 9))

    def gradient(tiled: bool) -> Tensor:
        torch.manual_seed(0)
        table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        hidden = F.embedding(tokens[:, :-1], table).tanh()
        if tiled:
            loss = head_loss(hidden, table, tokens[:, 1:], tile_tokens=5).mean()
        else:
            loss = F.cross_entropy((hidden @ table.t()).flatten(0, 1), tokens[:, 1:].flatten())
        (loss + hidden.square().sum()).backward()
        assert table.grad is not None
        return table.grad

    torch.testing.assert_close(gradient(True), gradient(False))


def test_a_view_with_gaps_is_read_as_it_is():
    wide = torch.randn(4, 9, 2 * WIDTH, requires_grad=True)
    case = Case(4, 8)
    losses = head_loss(wide[:, 1:, ::2], case.weight, case.targets)
    losses.sum().backward()
    case.hidden = wide.detach()[:, 1:, ::2].requires_grad_()
    case.bias = None
    torch.testing.assert_close(losses, case.plain())
    assert wide.grad is not None
    torch.testing.assert_close(wide.grad[:, 1:, ::2], torch.autograd.grad(case.plain().sum(), case.hidden)[0])


def test_the_weights_gradient_is_added_in_ranges_of_rows(monkeypatch):
    # The product in fp32 of 16-bit matrices is a GPU's; here it is stood in for.
    sizes = []

    def product(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        sizes.append(len(a))
        return a.to(out_dtype) @ b.to(out_dtype)

    monkeypatch.setattr(cross_entropy, "VOCABULARY_ROWS", 16)
    monkeypatch.setattr(torch, "mm", product)
    slope, hidden, total = torch.randn(5, 37).bfloat16(), torch.randn(5, 12).bfloat16(), torch.ones(37, 12)
    cross_entropy._add_product_(total, slope, hidden)
    assert sizes == [16, 16, 5]
    torch.testing.assert_close(total, 1 + slope.float().t() @ hidden.float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vocabulary", [128_000, 128_001])
def test_on_a_gpu_a_large_vocabulary_takes_a_few_tiles_of_memory(vocabulary):
    torch.manual_seed(0)
    hidden = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, 256, device="cuda") / 16).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (8192,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        head_loss(hidden, weight, targets).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    peak = torch.cuda.max_memory_allocated() - before
    gradients = weight.numel() * 6 + hidden.numel() * 2
    assert peak < gradients + 3 * 1024 * vocabulary * 4
    expected = torch.autograd.grad(F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum"), weight)[0]
    assert weight.grad is not None
    assert (weight.grad.float() - expected.float()).norm() < 0.01 * expected.float().norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_results_repeat_bit_for_bit_and_torch_agrees_that_they_must():
    torch.use_deterministic_algorithms(True)
    try:
        case = Case(64, dtype=torch.bfloat16, device="cuda", vocabulary=20_000)
        first, second = (case.gradients(case.tiled(tile_tokens=16)) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("token", [VOCABULARY, VOCABULARY + 5, -1, -101])
def test_a_target_outside_the_vocabulary_is_refused(token):
    case = Case(3, 4)
    case.targets[1, 2] = token
    with pytest.raises(DataError, match=rf"Token {token} is not in the vocabulary of {VOCABULARY}"):
        case.tiled()


def test_what_does_not_fit_together_is_refused_with_its_shapes():
    hidden, weight, targets = torch.zeros(2, 3, 8), torch.zeros(5, 8), torch.zeros(2, 3, dtype=torch.long)
    for wrong in (
        lambda: head_loss(hidden, weight, targets[:, :2]),
        lambda: head_loss(hidden, weight.t(), targets),
        lambda: head_loss(hidden, weight[0], targets),
        lambda: head_loss(hidden, weight, targets, bias=torch.zeros(8)),
    ):
        with pytest.raises(ModelError, match=r"\(2, 3, 8\).*Give hidden states"):
            wrong()


@pytest.mark.parametrize("option", [{"tile_tokens": 0}, {"tile_tokens": -1}, {"label_smoothing": -0.1},
                                    {"label_smoothing": 1.5}])  # fmt: skip
def test_options_that_make_no_sense_are_refused(option):
    with pytest.raises(ModelError, match="head_loss cannot work"):
        Case(3).tiled(**option)


def test_mixed_types_are_refused_without_an_autocast():
    case = Case(3, bias=False)
    with pytest.raises(ModelError, match=r"bfloat16.*float32.*autocast"):
        head_loss(case.hidden.bfloat16(), case.weight, case.targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert head_loss(case.hidden.bfloat16(), case.weight, case.targets).dtype == torch.float32


def test_a_second_derivative_is_refused_rather_than_zero():
    case = Case(3)
    with pytest.raises(ModelError, match="no second derivative"):
        torch.autograd.grad(case.tiled().sum(), case.hidden, create_graph=True)


def test_shapes_can_be_found_on_the_meta_device():
    hidden = torch.empty(4, 8, WIDTH, device="meta", requires_grad=True)
    weight = torch.empty(VOCABULARY, WIDTH, device="meta", requires_grad=True)
    losses = head_loss(hidden, weight, torch.empty(4, 8, device="meta", dtype=torch.long))
    losses.sum().backward()
    assert losses.shape == (4, 8)
    assert hidden.grad is not None and weight.grad is not None and weight.grad.is_meta
