"""The gate of a SwiGLU in one pass, with nothing kept but its input.

torch's own operations keep the gate, the value and the gate's sigmoid apart; here the input of the two is kept whole
and the rest computed again, which takes less memory and a third of the passes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrainer.kernels.quant import jit

try:
    import triton.language as tl
    from triton.language import constexpr, tensor
except ImportError:
    tl = constexpr = tensor = None

TILE = 1024  # elements of one program


def swiglu(hidden: Tensor, use_triton: bool | None = None) -> Tensor:
    """silu(gate) * value, (..., 2 n) to (..., n): the first half is the gate, the second the value.

    >>> swiglu(torch.tensor([0.0, 5.0])).item()
    0.0
    """
    if (hidden.is_meta or (hidden.is_cuda and tl is not None)) if use_triton is None else use_triton:
        gated: Tensor = _Gate.apply(hidden)  # type: ignore[no-untyped-call]
        return gated
    gate, value = hidden.chunk(2, dim=-1)
    return F.silu(gate) * value


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        ctx.save_for_backward(hidden)
        half = hidden.shape[-1] // 2
        out = torch.empty((*hidden.shape[:-1], half), dtype=hidden.dtype, device=hidden.device)
        if not hidden.is_meta:
            gate_pass[_grid(hidden)](hidden, out, half, TILE=TILE)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        if not hidden.is_meta:
            gate_back_pass[_grid(hidden)](hidden, grad.contiguous(), of_hidden, hidden.shape[-1] // 2, TILE=TILE)
        return of_hidden


def _grid(hidden: Tensor) -> tuple[int, int]:
    half = hidden.shape[-1] // 2
    return hidden.numel() // (2 * half), -(-half // TILE)


@jit
def gate_pass(hidden: tensor, out: tensor, half: tensor, TILE: constexpr) -> None:  # noqa: N803
    """out = g * sigmoid(g) * v, a row for each token."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < half
    gate = tl.load(hidden + row * 2 * half + channel, inside, 0.0).to(tl.float32)
    value = tl.load(hidden + row * 2 * half + half + channel, inside, 0.0).to(tl.float32)
    tl.store(out + row * half + channel, (gate * tl.sigmoid(gate) * value).to(out.dtype.element_ty), inside)


@jit
def gate_back_pass(hidden: tensor, grad: tensor, of_hidden: tensor, half: tensor, TILE: constexpr) -> None:  # noqa: N803
    """dg = d v s (1 + g (1 - s)), dv = d g s, with s = sigmoid(g)."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < half
    place = row * 2 * half + channel
    gate = tl.load(hidden + place, inside, 0.0).to(tl.float32)
    value = tl.load(hidden + place + half, inside, 0.0).to(tl.float32)
    d = tl.load(grad + row * half + channel, inside, 0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(of_hidden + place, (d * value * s * (1 + gate * (1 - s))).to(of_hidden.dtype.element_ty), inside)
    tl.store(of_hidden + place + half, (d * gate * s).to(of_hidden.dtype.element_ty), inside)
