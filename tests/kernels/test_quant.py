"""Triton's rounding and codes are those of the reference."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.device import DEVICE
from tests.kernels.making import same_bits
from tests.kernels.test_rounding import ALL_CODES, draws, fp32_of_every_kind

from hybridtrainer.kernels import rounding

triton = pytest.importorskip("triton", reason="the kernels need Triton")

import triton.language as tl  # noqa: E402

from hybridtrainer.kernels import quant  # noqa: E402
from hybridtrainer.kernels.quant import jit  # noqa: E402


@jit
def hash_kernel(out, start, key_low, key_high, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    tl.store(out + lane, quant.random_bits(start + lane.to(tl.int64), key_low, key_high).to(tl.int64))


@jit
def round_kernel(values, bits, out, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + at, quant.round_randomly(tl.load(values + at), tl.load(bits + at).to(tl.uint32)))


@jit
def split_kernel(values, high, low, joined, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    upper, rest = quant.split(tl.load(values + at))
    tl.store(high + at, upper)
    tl.store(low + at, rest)
    tl.store(joined + at, quant.join(upper, rest))


@jit
def code_kernel(
    values, bits, codes, scales, decoded, TOP: tl.constexpr, POWER: tl.constexpr, SMALLEST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(values + at)
    q, scale = quant.encode(value, tl.sqrt(tl.abs(value)), tl.load(bits + at), TOP, POWER, SMALLEST)
    tl.store(codes + at, q)
    tl.store(scales + row, scale)
    tl.store(decoded + at, quant.decode(q, scale, TOP, POWER))


@jit
def pack_kernel(codes, packed, unpacked, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    half = quant.pack(tl.load(codes + row * BLOCK + tl.arange(0, BLOCK)[None, :]))
    tl.store(packed + row * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :], half)
    tl.store(unpacked + row * BLOCK + tl.arange(0, BLOCK)[None, :], quant.unpack(half))


@pytest.mark.parametrize("start", [0, 1000, 2**31 - 100, 2**32 - 100, 2**40 + 7])
@pytest.mark.parametrize("key", [rounding.mix_key(1, 2, 3, 4), 0, 2**64 - 1, 0x80000000_7FFFFFFF])
def test_random_bits_are_those_of_the_reference_for_every_key_and_index(start, key):
    low, high = (half - (half >> 31 << 32) for half in (key & 0xFFFFFFFF, key >> 32))
    out = torch.empty(256, dtype=torch.int64, device=DEVICE)
    hash_kernel[(1,)](out, start, low, high, COUNT=256)
    assert torch.equal(out.cpu(), rounding.random_bits(key, start + torch.arange(256)))


def every_kind() -> torch.Tensor:
    values = fp32_of_every_kind()
    return values[: len(values) // 4096 * 4096].to(DEVICE)


def test_random_rounding_is_that_of_the_reference():
    values = every_kind()
    values = values[values.abs() < 3.37e38][: 4096 * 10]
    bits = draws(len(values)).to(DEVICE)
    out = torch.empty(len(values), dtype=torch.bfloat16, device=DEVICE)
    round_kernel[(len(values) // 4096,)](values, bits, out, COUNT=4096)
    assert same_bits(out, rounding.round_randomly(values, bits))


def test_halves_are_those_of_the_reference_and_join_exactly():
    values = every_kind()
    high, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    joined = torch.empty_like(values)
    split_kernel[(len(values) // 4096,)](values, high, low, joined, COUNT=4096)
    expected = rounding.split(values)
    assert same_bits(high, expected[0]) and same_bits(low, expected[1]) and same_bits(joined, values)


@ALL_CODES
def test_codes_are_those_of_the_reference_but_where_rounding_decides(top, power, block):
    count, rows = 16_384, 1024 // block
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 0, count)
    values[:block] = 0
    values[block : 2 * block] *= 1e-20
    values = (values if power == 2 else values.square()).to(DEVICE)
    bits = draws(count).to(DEVICE)
    codes, decoded = torch.empty(count, dtype=torch.int32, device=DEVICE), torch.empty_like(values)
    scales = torch.empty(count // block, device=DEVICE)
    code_kernel[(count // 1024,)](
        values, bits, codes, scales, decoded,
        TOP=top, POWER=power, SMALLEST=rounding.SMALLEST_SCALE, ROWS=rows, BLOCK=block,
    )  # fmt: skip
    expected, expected_scales = rounding.encode(values, top, power, block, bits)
    assert torch.equal(scales, expected_scales)
    difference = (codes - expected).abs()
    assert float(difference.max()) <= 1 and int((difference > 0).sum()) <= count // 1000
    each_scale = scales.repeat_interleave(block)
    assert bool((codes[values.abs() == each_scale].abs() == top).all())
    assert power == 2 or int((codes == 0).sum()) == int((values == 0).sum())
    torch.testing.assert_close(decoded, rounding.decode(codes, scales, top, power, block), rtol=1e-6, atol=0)


def test_codes_are_packed_as_in_the_reference():
    codes = (torch.arange(512, dtype=torch.int32) * 7 % 15 - 7).to(DEVICE)
    packed = torch.empty(256, dtype=torch.uint8, device=DEVICE)
    unpacked = torch.empty(512, dtype=torch.int32, device=DEVICE)
    pack_kernel[(1,)](codes, packed, unpacked, ROWS=4, BLOCK=128)
    assert torch.equal(packed, rounding.pack(codes))
    assert torch.equal(unpacked, rounding.unpack(packed, 512, signed=False))
