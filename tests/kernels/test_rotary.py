from __future__ import annotations

import pytest
import torch
from tests.kernels.device import DEVICE

from hybridtrainer.kernels import rotary
from hybridtrainer.kernels.rotary import rotate

pytest.importorskip("triton")


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 1, 1, 2), (2, 2, 70, 6), (1, 2, 130, 64)])
@pytest.mark.parametrize("strided", [False, True])
def test_the_kernel_turns_as_the_reference_does_and_back(shape, strided):
    generator = torch.Generator(DEVICE).manual_seed(0)
    batch, heads, time, width = shape
    x = torch.randn((batch, time, heads, width), generator=generator, device=DEVICE).transpose(1, 2)
    x = x if strided else x.contiguous()
    grad = torch.randn(shape, generator=generator, device=DEVICE)
    results = []
    for use_triton in (False, True):
        leaf = x.detach().requires_grad_()
        turned = rotate(leaf, use_triton=use_triton)
        turned.backward(grad.transpose(2, 3).contiguous().transpose(2, 3) if strided else grad)
        results.append((turned.detach(), leaf.grad))
    for one, other in zip(*results, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_lengths_are_kept_and_products_depend_on_distance_alone():
    x = torch.randn(1, 1, 1, 16, generator=torch.Generator().manual_seed(1)).expand(1, 1, 40, 16).to(DEVICE)
    turned = rotate(x, use_triton=True)[0, 0]
    torch.testing.assert_close(turned.norm(dim=-1), x[0, 0].norm(dim=-1))
    products = turned @ turned.T
    torch.testing.assert_close(products[3, 10], products[20, 27], rtol=1e-4, atol=1e-4)


def test_half_precision_is_computed_in_full():
    x = torch.randn(1, 2, 30, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    exact = rotate(x, use_triton=False)
    found = rotate(x.half(), use_triton=True)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), exact, rtol=2e-3, atol=2e-3)


def test_the_reference_is_used_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(rotary, "_launch", None)
    assert rotate(torch.ones(1, 1, 3, 4)).shape == (1, 1, 3, 4)


def test_on_the_meta_device_memory_is_that_of_a_gpu():
    x = torch.empty(1, 2, 4, 8, device="meta", requires_grad=True)
    out = rotate(x)
    assert (out.shape, out.device.type, type(out.grad_fn).__name__) == (x.shape, "meta", "_TurnBackward")
    (grad,) = torch.autograd.grad(out.sum(), [x])
    assert grad.shape == x.shape
