"""The functions of `rounding.py` for Triton kernels, on tiles of one row per block of codes.

Without Triton the module can be imported, but nothing in it called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor
except ImportError:
    triton = tl = constexpr = tensor = None


def jit(function: Callable[..., Any]) -> Any:
    """Compiles a function for the GPU when it is first launched.

    Keys and the place in a ring differ in every step: a kernel specialized on them would be compiled again and again.
    """
    if triton is None:
        return function
    changing = ["weight_key_low", "weight_key_high", "key_low", "key_high", "newest", "known"]
    return triton.jit(function, do_not_specialize=changing)


@jit
def random_bits(index: tensor, key_low: tensor, key_high: tensor) -> tensor:
    """32 random bits as uint32 for each int64 index, from the halves of a key as int32."""
    x = index.to(tl.uint32) ^ key_low.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x + key_high.to(tl.uint32, bitcast=True) + (index >> 32).to(tl.uint32)
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def round_randomly(values: tensor, bits: tensor) -> tensor:
    """fp32 as one of the two nearest bf16: the low 16 random bits are added, the low 16 of the sum cut off."""
    moved = values.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)
    return (moved >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def split(values: tensor) -> tensor:
    """fp32 as the nearest bf16 and a signed rest: high = (bits + 0x8000) >> 16, low = bits - (high << 16)."""
    bits = values.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    return high.to(tl.int16).to(tl.bfloat16, bitcast=True), (bits - (high << 16)).to(tl.int16)


@jit
def join(high: tensor, low: tensor) -> tensor:
    """fp32 of a bf16 and its rest: bits = (high << 16) + low."""
    bits = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@jit
def encode(
    values: tensor, root: tensor, bits: tensor,
    TOP: constexpr, POWER: constexpr, SMALLEST: constexpr,  # noqa: N803 - Triton's custom for constants
) -> tensor:  # fmt: skip
    """Codes q, as int32, with values = sign(q) * (|q| / TOP)^POWER * scale, and a scale for each row.

    With x = |value| / scale * TOP^POWER, |q| is the code below, or the one above it where
    draw * ((|q| + 1)^POWER - |q|^POWER) < x - |q|^POWER. For POWER 4 it is at least 1 where the value is positive.

    `root` is sqrt(|values|), which the update of a second moment has already. A GPU has eight times as many lanes
    for sums and products as for roots and divisions, and an update has to keep up with its memory.
    """
    magnitudes = tl.abs(values)
    scale = tl.maximum(tl.max(magnitudes, axis=1), SMALLEST)
    unit = (TOP * TOP if POWER == 2 else TOP * TOP * TOP * TOP) * 1.0 / scale
    scaled_root = root * tl.sqrt(unit)[:, None]
    if POWER == 2:
        below = tl.floor(scaled_root)
        power = below * below
        gap = 2 * below + 1
    else:
        below = tl.floor(tl.sqrt(scaled_root))
        square = below * below
        power = square * square
        gap = (2 * below + 1) * (2 * (square + below) + 1)
    draw = bits.to(tl.float32) * 1.52587890625e-05 + 7.62939453125e-06  # (bits + 0.5) / 2^16
    codes = tl.where(draw * gap < magnitudes * unit[:, None] - power, below + 1, below)
    codes = tl.where(magnitudes >= scale[:, None], TOP, tl.minimum(codes, TOP))
    if POWER == 4:
        codes = tl.where(magnitudes > 0, tl.maximum(codes, 1), codes)
    return tl.where(values < 0, -codes, codes).to(tl.int32), scale


@jit
def decode(codes: tensor, scale: tensor, TOP: constexpr, POWER: constexpr) -> tensor:  # noqa: N803
    """sign(q) * (|q| / TOP)^POWER * scale, in rows with a scale each."""
    wide = codes.to(tl.float32)
    if POWER == 2:
        powers = wide * tl.abs(wide)
        largest = TOP * TOP
    else:
        powers = (wide * wide) * (wide * wide)
        largest = TOP * TOP * TOP * TOP
    return powers * (scale / (largest * 1.0))[:, None]


@jit
def pack(codes: tensor) -> tensor:
    """Rows of 4-bit codes, as int32, two to a byte: the first in the low half."""
    first, second = tl.split(tl.reshape(codes & 15, [codes.shape[0], codes.shape[1] // 2, 2]))
    return (first | (second << 4)).to(tl.uint8)


@jit
def unpack(packed: tensor) -> tensor:
    """Rows of 4-bit codes without sign, as int32, from bytes."""
    wide = packed.to(tl.int32)
    return tl.interleave(wide & 15, wide >> 4)
