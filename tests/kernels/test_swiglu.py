from __future__ import annotations

import pytest
import torch
from tests.kernels.device import DEVICE

from hybridtrainer.kernels.swiglu import swiglu

pytest.importorskip("triton")


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 2), (4, 2 * 1500), (1, 2 * 1024), (2, 3, 2 * 17)])
def test_the_kernel_equals_the_reference_forward_and_backward(shape):
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(shape, generator=generator, device=DEVICE) * 4
    grad = torch.randn((*shape[:-1], shape[-1] // 2), generator=generator, device=DEVICE)
    results = []
    for use_triton in (False, True):
        leaf = x.detach().requires_grad_()
        gated = swiglu(leaf, use_triton=use_triton)
        gated.backward(grad)
        results.append((gated.detach(), leaf.grad))
    for one, other in zip(*results, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_strided_inputs_and_gradients_are_taken():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE).T  # (4, 6), not contiguous
    leaves = [x.detach().requires_grad_() for _ in range(2)]
    for leaf, use_triton in zip(leaves, (False, True), strict=True):
        swiglu(leaf, use_triton=use_triton).sum().backward()  # the gradient of a sum is one expanded number
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_nothing_is_kept_but_the_input():
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        swiglu(x, use_triton=True)
    assert kept == [x.data_ptr()]


def test_extreme_gates_stay_finite():
    x = torch.tensor([[-1e4, 1e4, 3.0, 2.0]], device=DEVICE, requires_grad=True)
    swiglu(x, use_triton=True).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_on_the_meta_device_memory_is_that_of_a_gpu():
    hidden = torch.empty(4, 8, device="meta", requires_grad=True)
    out = swiglu(hidden)
    assert (out.shape, out.device.type, type(out.grad_fn).__name__) == ((4, 4), "meta", "_GateBackward")
    (grad,) = torch.autograd.grad(out.sum(), [hidden])
    assert grad.shape == hidden.shape
