"""Rotary positions (arXiv 2104.09864) in one pass over queries or keys.

Written with torch's own operations the turn takes seven passes forward and as many backward; in a decoder of 4096
that is an eighth of the step. The turn back by the same angle is its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtrainer.kernels.quant import jit

try:
    import triton.language as tl
    from triton.language import constexpr, tensor
except ImportError:
    tl = constexpr = tensor = None

HALF_WIDTH_TILE = 4096  # elements of one program


def rotate(x: Tensor, base: float = 10000.0, use_triton: bool | None = None) -> Tensor:
    """Turns pairs of channels by an angle that grows with the position.

    The channels i and i + width / 2 at position t turn by t * base^(-2 i / width).

    Args:
        x: (batch, heads, time, width).
        use_triton: Whether the kernel runs; by default on a GPU where Triton is installed.

    >>> [round(value, 4) for value in rotate(torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]]))[0, 0, 1].tolist()]
    [0.5403, 0.8415]
    """
    time, width = x.shape[-2:]
    frequency = base ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width)
    angle = torch.arange(time, device=x.device, dtype=torch.float32)[:, None] * frequency  # (time, width / 2)
    if (x.is_meta or (x.is_cuda and tl is not None)) if use_triton is None else use_triton:
        turned: Tensor = _Turn.apply(x, angle.cos(), angle.sin())  # type: ignore[no-untyped-call]
        return turned
    return turn(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The specification."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _launch(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _launch(grad, cos, sin, -1.0), None, None


def _launch(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    batch, heads, time, width = x.shape
    out = torch.empty((batch, heads, time, width), dtype=x.dtype, device=x.device)
    if x.is_meta:
        return out
    half = width // 2
    padded = 1 << (half - 1).bit_length()
    rows = max(1, HALF_WIDTH_TILE // padded)
    grid = (batch * heads, -(-time // rows))
    turn_pass[grid](
        x, out, cos, sin, sign, heads, time, x.stride(0), x.stride(1), x.stride(2), HALF=half, PADDED=padded, ROWS=rows
    )
    return out


@jit
def turn_pass(
    x: tensor, out: tensor, cos: tensor, sin: tensor, sign: tensor, heads: tensor, time: tensor,
    batch_stride: tensor, head_stride: tensor, time_stride: tensor,
    HALF: constexpr, PADDED: constexpr, ROWS: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """(a, b) becomes (a cos - b sin, b cos + a sin), with -sin where `sign` is -1; `out` is contiguous."""
    head = tl.program_id(0).to(tl.int64)
    position = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    channel = tl.arange(0, PADDED)[None, :]
    inside = (position < time) & (channel < HALF)
    source = x + (head // heads) * batch_stride + (head % heads) * head_stride + position * time_stride + channel
    target = out + (head * time + position) * (2 * HALF) + channel
    c = tl.load(cos + position * HALF + channel, inside, 0.0)
    s = tl.load(sin + position * HALF + channel, inside, 0.0) * sign
    a = tl.load(source, inside, 0.0).to(tl.float32)
    b = tl.load(source + HALF, inside, 0.0).to(tl.float32)
    tl.store(target, (a * c - b * s).to(out.dtype.element_ty), inside)
    tl.store(target + HALF, (b * c + a * s).to(out.dtype.element_ty), inside)
