"""Numbers kept in few bits, in plain PyTorch: halves of an fp32, random rounding, and block codes.

`quant.py` has the same functions for Triton, and the two agree: the random bits to the last one, the values up to the
rounding of fp32 arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

# No block's scale is smaller, because it could not be inverted. The root of such a second moment, 3e-14, is far below
# any eps.
SMALLEST_SCALE = 2.0**-90

_32_BITS = (1 << 32) - 1
_64_BITS = (1 << 64) - 1


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Finite fp32 values as the nearest bf16 (ties away from zero) and a signed rest of 16 bits.

    The bits of a value are those of its bf16, shifted up by 16, plus the rest.
    """
    bits = values.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 values that were split."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def mix_key(seed: int, step: int, tensor: int, use: int) -> int:
    """A key of 64 bits: SplitMix64's output function over the parts in turn (Steele et al., OOPSLA 2014)."""
    key = 0
    for part in (seed, step, tensor, use):
        key = (key + part + 0x9E3779B97F4A7C15) & _64_BITS
        key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
        key = ((key ^ key >> 27) * 0x94D049BB133111EB) & _64_BITS
        key ^= key >> 31
    return key


def random_bits(key: int, index: Tensor) -> Tensor:
    """32 random bits for each index, as int64: a function of key and index alone.

    The hash is lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018); half of the key enters before its
    first multiplication and half after it, so that two keys do not give the same bits in another order.
    """
    x = (index & _32_BITS) ^ (key & _32_BITS)
    x = ((x ^ x >> 16) * 0x7FEB352D) & _32_BITS
    x = (x + (key >> 32) + (index >> 32)) & _32_BITS
    x = ((x ^ x >> 15) * 0x846CA68B) & _32_BITS
    return x ^ x >> 16


def round_randomly(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 values as one of the two nearest bf16, up with the probability that makes the mean exact.

    The low 16 of the random bits are added below the bf16's last bit, and what is below it is cut off.
    """
    moved = values.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (moved >> 16).to(torch.int16).view(torch.bfloat16)


def encode(values: Tensor, top: int, power: int, block: int, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Codes q with values = sign(q) * (|q| / top)^power * scale, and a scale for each block: its largest magnitude.

    A value between two codes takes one of them at random, with the probability that makes the mean exact. A second
    moment (power 4) that is positive takes no code 0, which would leave eps alone to divide by.

    Args:
        values: Flat; those beyond the last whole block form a shorter one.
        top: The largest code.
        power: 2 or 4: small values get more codes than large ones.
        block: Elements that share a scale.
        bits: 16 random bits for each value.

    Returns:
        The codes as fp32, and the scales.
    """
    magnitudes = _in_blocks(values.abs(), block)
    scale = magnitudes.amax(1, keepdim=True).clamp(min=SMALLEST_SCALE)
    x = magnitudes * (float(top) ** power / scale)
    below = (x.sqrt() if power == 2 else x.sqrt().sqrt()).floor()
    floor, ceiling = below**power, (below + 1) ** power
    threshold = (_in_blocks(bits, block) + 0.5) * 2.0**-16
    codes = below + (threshold * (ceiling - floor) < x - floor)
    codes = torch.where(magnitudes >= scale, float(top), codes.clamp(max=top))
    if power == 4:
        codes = torch.where(magnitudes > 0, codes.clamp(min=1), codes)
    return codes.reshape(-1)[: len(values)] * values.sign(), scale.reshape(-1)


def decode(codes: Tensor, scale: Tensor, top: int, power: int, block: int) -> Tensor:
    """The values of codes; a state of zeros is one of zero moments."""
    wide = codes.float()
    unit = (scale / float(top) ** power).repeat_interleave(block)[: len(codes)]
    return (wide * wide.abs() if power == 2 else wide.square().square()) * unit


def pack(codes: Tensor) -> Tensor:
    """4-bit codes two to a byte, the first in the low half; negative ones in two's complement."""
    pairs = (pad(codes.to(torch.int32), (0, len(codes) % 2)) & 15).view(-1, 2)
    return (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8)


def unpack(packed: Tensor, count: int, signed: bool) -> Tensor:
    """The first `count` codes of packed bytes."""
    codes = torch.stack([packed & 15, packed >> 4], 1).reshape(-1)[:count].to(torch.int32)
    return (codes ^ 8) - 8 if signed else codes


def _in_blocks(flat: Tensor, block: int) -> Tensor:
    return pad(flat, (0, -len(flat) % block)).view(-1, block)
