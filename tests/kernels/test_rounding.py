"""Few bits: halves join exactly, random rounding is right on average, and codes err no more than a gap."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.making import same_bits

from hybridtrainer.kernels.rounding import (
    SMALLEST_SCALE,
    decode,
    encode,
    join,
    mix_key,
    pack,
    random_bits,
    round_randomly,
    split,
    unpack,
)

FIRST8, SECOND8, FIRST4, SECOND4 = (127, 2, 256), (255, 4, 256), (7, 2, 128), (15, 4, 128)
ALL_CODES = pytest.mark.parametrize(("top", "power", "block"), [FIRST8, SECOND8, FIRST4, SECOND4])


def fp32_of_every_kind() -> torch.Tensor:
    """Random bits without NaN and infinity, ties, denormals, zeros, and the largest finite value; both signs."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    ties = torch.randint(0, 0x7F7F, (1000,), generator=generator).to(torch.int32) * 65536 + 0x8000
    special = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0x007FFFFF, 0x00800000, 0x7F7F7FFF], dtype=torch.int32)
    values = torch.cat([bits, ties, special]).view(torch.float32)
    values = values[values.isfinite() & (values.abs() < 3.38e38)]
    return torch.cat([values, -values])


def draws(count: int, seed: int = 0) -> torch.Tensor:
    return random_bits(mix_key(seed, 1, 2, 3), torch.arange(count)) & 0xFFFF


def test_halves_join_to_exactly_the_value_that_was_split():
    values = fp32_of_every_kind()
    high, low = split(values)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    assert same_bits(join(high, low), values)


def test_the_largest_finite_value_joins_although_no_bf16_is_near():
    values = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    assert same_bits(join(*split(values)), values)


def test_the_upper_half_is_the_nearest_bf16():
    values = fp32_of_every_kind()
    high, _ = split(values)
    nearest = values.to(torch.bfloat16)
    assert torch.equal((high.double() - values.double()).abs(), (nearest.double() - values.double()).abs())
    ties = high != nearest  # torch rounds a tie to the even one, here it goes away from zero
    assert 0 < int(ties.sum()) < 4000
    assert bool((high[ties].abs() > nearest[ties].abs()).all())


def test_random_bits_are_uniform():
    bits = random_bits(mix_key(1, 2, 3, 0), torch.arange(1 << 18))
    assert int(bits.min()) >= 0 and int(bits.max()) < 1 << 32
    for shift in (0, 8, 16, 24):
        counts = torch.bincount(bits >> shift & 255, minlength=256).double()
        expected = len(bits) / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < 4 * (2 * 255) ** 0.5
    each = torch.stack([bits >> i & 1 for i in range(32)]).double().mean(1)
    assert bool(((each - 0.5).abs() < 4.5 * 0.5 / len(bits) ** 0.5).all())


def test_one_bit_of_the_index_changes_half_of_the_random_bits():
    key, index = mix_key(0, 0, 0, 0), torch.arange(1 << 12)
    for flip in range(40):
        changed = random_bits(key, index) ^ random_bits(key, index ^ (1 << flip))
        share = torch.stack([changed >> i & 1 for i in range(32)]).double().mean()
        # Indices 2^32 apart pass through half of the hash only: they are never neighbours.
        assert abs(float(share) - 0.5) < (0.02 if flip < 32 else 0.1), flip


@pytest.mark.parametrize("other", [(1, 2, 3, 1), (1, 2, 4, 0), (1, 3, 3, 0), (2, 2, 3, 0), (2, 1, 3, 0)])
def test_keys_give_streams_that_have_nothing_in_common(other):
    index = torch.arange(1 << 16)
    one = random_bits(mix_key(1, 2, 3, 0), index)
    two = random_bits(mix_key(*other), index)
    both = torch.stack([one, two]).double()
    assert abs(float(torch.corrcoef(both)[0, 1])) < 4.5 / len(index) ** 0.5
    assert int((one == two).sum()) <= 2
    swapped = index ^ ((mix_key(1, 2, 3, 0) ^ mix_key(*other)) & 0xFFFFFFFF)
    assert int((random_bits(mix_key(*other), swapped) == one).sum()) <= 2  # nor the same bits in another order
    assert len({mix_key(1, 2, 3, use) for use in range(1000)}) == 1000


def test_random_rounding_is_right_on_average_and_takes_a_neighbour():
    value = torch.tensor([1.0 + 0.3 * 2**-7, -3.0 - 0.9 * 2**-6, 1e-3, 2.0**-127 * 1.001, 5.0])
    count = 1 << 16
    rounded = round_randomly(value.repeat_interleave(count), draws(count * len(value))).double().view(-1, count)
    below = (value.view(torch.int32) & -65536).view(torch.float32).double()
    above = ((value.view(torch.int32) & -65536) + 65536).view(torch.float32).double()
    for i, mean in enumerate(rounded.mean(1)):
        assert set(rounded[i].tolist()) <= {float(below[i]), float(above[i])}
        gap = abs(float(above[i] - below[i]))
        assert abs(float(mean) - float(value[i].double())) < 4 * 0.5 * gap / count**0.5
    assert bool((rounded[4] == 5.0).all())  # what a bf16 can hold stays


@ALL_CODES
def test_a_code_is_one_of_the_two_around_the_value_and_the_largest_is_exact(top, power, block):
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 0, 10_000)
    values = values if power == 2 else values.square()
    codes, scale = encode(values, top, power, block, draws(len(values)))
    assert torch.equal(codes, codes.round()) and float(codes.abs().max()) == top
    each_scale = scale.repeat_interleave(block)[: len(values)]
    exact = (values.abs() / each_scale) ** (1 / power) * top
    positive_at_least_one = exact.clamp(min=1) if power == 4 else exact
    assert float((codes.abs() - positive_at_least_one).abs().max()) < 1.001
    largest = values.abs() == each_scale
    assert int(largest.sum()) == len(scale)
    assert bool((codes[largest].abs() == top).all())
    decoded = decode(codes, scale, top, power, block)
    torch.testing.assert_close(decoded[largest], values[largest], rtol=1e-6, atol=0)
    assert bool((decoded * values >= 0).all())


@ALL_CODES
def test_codes_are_right_on_average(top, power, block):
    count = 20_000
    values = torch.tensor([0.003, 0.05, 0.31, 0.77, 0.9999, 1.0]).repeat_interleave(block - 1)
    blocks = torch.cat([values.view(-1, block - 1), torch.ones(6, 1)], 1)  # the scale is 1
    total = torch.zeros(6, dtype=torch.float64)
    repeats = count // block
    for repeat in range(repeats):
        coded = encode(blocks.view(-1), top, power, block, draws(blocks.numel(), seed=repeat))
        total += decode(*coded, top, power, block).view(6, block)[:, :-1].double().mean(1)
    gap = power / top  # the widest of all
    difference = (total / repeats - blocks[:, 0].double()).abs()
    assert bool((difference < 4 * 0.5 * gap / count**0.5).all()), difference


@pytest.mark.parametrize(("top", "power", "block"), [SECOND8, SECOND4])
def test_a_positive_second_moment_never_gets_code_zero(top, power, block):
    values = torch.logspace(-44, 4, 20_000)
    values[0] = 0
    codes, _ = encode(values[torch.randperm(20_000)], top, power, block, draws(20_000))
    assert int((codes == 0).sum()) == 1


@ALL_CODES
def test_zeros_and_values_too_small_to_matter_are_kept_as_such(top, power, block):
    codes, scale = encode(torch.zeros(2 * block), top, power, block, draws(2 * block))
    assert not codes.any() and not decode(codes, scale, top, power, block).any()
    assert not decode(torch.ones(3), torch.zeros(1), top, power, block).any()
    tiny = torch.full((block,), SMALLEST_SCALE / 1000)
    codes, scale = encode(tiny, top, power, block, draws(block))
    assert bool(decode(codes, scale, top, power, block).isfinite().all())
    assert float(decode(codes, scale, top, power, block).max()) <= SMALLEST_SCALE


def test_a_second_moment_of_8_bits_reaches_its_mean_where_the_nearest_code_would_stick():
    gradient = torch.cat([torch.ones(1), torch.full((255,), 0.3)])
    start = torch.cat([torch.ones(1), torch.full((255,), 0.08)])
    top, power, block = SECOND8
    random, nearest = encode(start, *SECOND8, draws(256)), encode(start, *SECOND8, draws(256))
    for step in range(4000):
        v = torch.lerp(decode(*random, top, power, block), gradient.square(), 1e-3)
        random = encode(v, *SECOND8, draws(256, seed=step))
        v = torch.lerp(decode(*nearest, top, power, block), gradient.square(), 1e-3)
        nearest = ((v / v.max()) ** 0.25 * top).round(), v.max().view(1)
    assert float(decode(*random, top, power, block)[1:].mean()) == pytest.approx(0.09, rel=0.02)
    assert float(decode(*nearest, top, power, block)[1:].mean()) == pytest.approx(0.08, rel=0.02)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 257])
def test_packed_codes_come_back(count):
    signed = torch.arange(count) % 15 - 7
    assert torch.equal(unpack(pack(signed), count, signed=True), signed.to(torch.int32))
    unsigned = torch.arange(count) % 16
    packed = pack(unsigned)
    assert len(packed) == (count + 1) // 2
    assert torch.equal(unpack(packed, count, signed=False), unsigned.to(torch.int32))
