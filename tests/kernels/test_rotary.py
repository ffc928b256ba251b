from __future__ import annotations

import pytest
import torch
from tests.kernels.device import DEVICE
from torch import Tensor

from hybridtrainer.kernels import rotary
from hybridtrainer.kernels.rotary import split_rotated

pytest.importorskip("triton")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    ("batch", "time", "heads", "kv_heads", "width"),
    [(2, 5, 3, 3, 8), (1, 1, 1, 1, 2), (2, 70, 4, 2, 6), (1, 130, 4, 1, 64)],
)
@pytest.mark.parametrize("strided", [False, True])
def test_the_kernel_turns_as_the_reference_does_and_back(batch, time, heads, kv_heads, width, strided):
    x = draw(batch, time, heads + 2 * kv_heads, width)
    if strided:  # as a slice of something wider
        x = torch.cat([x, x], dim=2)[:, :, : heads + 2 * kv_heads]
    grads = [draw(batch, n, time, width, seed=1 + number) for number, n in enumerate((heads, kv_heads, kv_heads))]
    if strided:
        grads = [grad.transpose(2, 3).contiguous().transpose(2, 3) for grad in grads]
    results = []
    for use_triton in (False, True):
        leaf = x.detach().requires_grad_()
        found = split_rotated(leaf, heads, kv_heads, use_triton=use_triton)
        (of_leaf,) = torch.autograd.grad(found, [leaf], grads)
        results.append((*(each.detach() for each in found), of_leaf))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_values_are_not_turned():
    x = draw(2, 7, 4, 8)
    _, _, v = split_rotated(x, 2, 1, use_triton=True)
    assert torch.equal(v, x[:, :, 3:].transpose(1, 2))


def test_lengths_are_kept_and_products_depend_on_distance_alone():
    x = draw(1, 1, 3, 16, seed=1).expand(1, 40, 3, 16)
    q, _, _ = split_rotated(x, 1, 1, use_triton=True)
    turned = q[0, 0]
    torch.testing.assert_close(turned.norm(dim=-1), x[0, :, 0].norm(dim=-1))
    products = turned @ turned.T
    torch.testing.assert_close(products[3, 10], products[20, 27], rtol=1e-4, atol=1e-4)


def test_half_precision_is_computed_in_full():
    x = draw(1, 30, 4, 32, seed=2)
    exact = split_rotated(x, 2, 1, use_triton=False)
    found = split_rotated(x.half(), 2, 1, use_triton=True)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float16
        torch.testing.assert_close(one.float(), other, rtol=2e-3, atol=2e-3)


def test_the_reference_is_used_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(rotary, "_launch", None)
    assert split_rotated(torch.ones(1, 3, 6, 4), 4, 1)[0].shape == (1, 4, 3, 4)


def test_on_the_meta_device_memory_is_that_of_a_gpu():
    x = torch.empty(1, 4, 6, 8, device="meta", requires_grad=True)
    q, _, _ = split_rotated(x, 2, 2)
    assert (q.shape, q.device.type, type(q.grad_fn).__name__) == ((1, 2, 4, 8), "meta", "_SplitTurnBackward")
    (grad,) = torch.autograd.grad(q.sum(), [x])
    assert grad.shape == x.shape
