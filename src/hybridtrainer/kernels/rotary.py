"""Rotary positions (arXiv 2104.09864) in one pass over queries and one over keys.

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


def split_rotated(
    qkv: Tensor, heads: int, kv_heads: int, base: float = 10000.0, use_triton: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, of which the first two are turned: pairs of channels by an angle that grows with time.

    The channels i and i + width / 2 at position t turn by t * base^(-2 i / width).

    Args:
        qkv: (batch, time, heads + 2 * kv_heads, width).
        use_triton: Whether the kernel runs; by default on a GPU where Triton is installed.

    Returns:
        (batch, heads, time, width), and twice the same with `kv_heads`.

    >>> q, k, v = split_rotated(torch.tensor([1.0, 0.0]).expand(1, 2, 3, 2), 1, 1)
    >>> [round(value, 4) for value in q[0, 0, 1].tolist()], v[0, 0, 1].tolist()
    ([0.5403, 0.8415], [1.0, 0.0])
    """
    time, width = qkv.shape[1], qkv.shape[3]
    frequency = base ** (-torch.arange(0, width, 2, device=qkv.device, dtype=torch.float32) / width)
    angle = torch.arange(time, device=qkv.device, dtype=torch.float32)[:, None] * frequency  # (time, width / 2)
    cos, sin = angle.cos(), angle.sin()
    if (qkv.is_meta or (qkv.is_cuda and tl is not None)) if use_triton is None else use_triton:
        turned: tuple[Tensor, Tensor, Tensor] = _SplitTurn.apply(qkv, cos, sin, heads, kv_heads)  # type: ignore[no-untyped-call]
        return turned
    q, k, v = _split(qkv, heads, kv_heads)
    cos, sin = cos.to(qkv.dtype), sin.to(qkv.dtype)
    return turn(q, cos, sin), turn(k, cos, sin), v


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The specification."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _SplitTurn(torch.autograd.Function):
    """Its gradient is written straight into one tensor; autograd would join three and copy the result."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.shape, ctx.heads, ctx.kv_heads = qkv.shape, heads, kv_heads
        q, k, v = _split(qkv, heads, kv_heads)
        turned = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
        for source, target in zip((q, k), turned, strict=True):
            _launch(source, target, cos, sin, 1.0)
        return *turned, v

    @staticmethod
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor, of_v: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        of_qkv = torch.empty(ctx.shape, dtype=of_q.dtype, device=of_q.device)
        q, k, v = _split(of_qkv, ctx.heads, ctx.kv_heads)
        _launch(of_q, q, cos, sin, -1.0)
        _launch(of_k, k, cos, sin, -1.0)
        v.copy_(of_v)
        return of_qkv, None, None, None, None


def _split(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)  # type: ignore[no-untyped-call]
    return q, k, v


def _launch(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    if x.is_meta:
        return
    if x.stride(-1) != 1:
        x = x.contiguous()
    batch, heads, time, width = x.shape
    half = width // 2
    padded = 1 << (half - 1).bit_length()
    rows = max(1, HALF_WIDTH_TILE // padded)
    grid = (batch * heads, -(-time // rows))
    turn_pass[grid](
        x, out, cos, sin, sign, heads, time, *x.stride()[:3], *out.stride()[:3], HALF=half, PADDED=padded, ROWS=rows
    )


@jit
def turn_pass(
    x: tensor, out: tensor, cos: tensor, sin: tensor, sign: tensor, heads: tensor, time: tensor,
    batch_stride: tensor, head_stride: tensor, time_stride: tensor,
    out_batch_stride: tensor, out_head_stride: tensor, out_time_stride: tensor,
    HALF: constexpr, PADDED: constexpr, ROWS: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """(a, b) becomes (a cos - b sin, b cos + a sin), with -sin where `sign` is -1."""
    head = tl.program_id(0).to(tl.int64)
    position = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    channel = tl.arange(0, PADDED)[None, :]
    inside = (position < time) & (channel < HALF)
    sample, own = head // heads, head % heads
    source = x + sample * batch_stride + own * head_stride + position * time_stride + channel
    target = out + sample * out_batch_stride + own * out_head_stride + position * out_time_stride + channel
    c = tl.load(cos + position * HALF + channel, inside, 0.0)
    s = tl.load(sin + position * HALF + channel, inside, 0.0) * sign
    a = tl.load(source, inside, 0.0).to(tl.float32)
    b = tl.load(source + HALF, inside, 0.0).to(tl.float32)
    tl.store(target, (a * c - b * s).to(out.dtype.element_ty), inside)
    tl.store(target + HALF, (b * c + a * s).to(out.dtype.element_ty), inside)
