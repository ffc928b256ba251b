"""Packed patterns come back bit for bit, by Triton and by the reference, which agree in every byte."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.device import DEVICE
from tests.kernels.making import same_bits
from torch import Tensor

from hybridtrainer.kernels import packed as module
from hybridtrainer.kernels.packed import ESCAPES, GROUP, pack_, packed_bytes, unpack_

BEYOND = 64  # bytes after the packed ones, which nobody may write


def gaussian(groups: int, seed: int = 0) -> Tensor:
    return torch.randn(groups * GROUP, generator=torch.Generator().manual_seed(seed))


def like_trained(groups: int) -> Tensor:
    """Rows of different spread, some values set to zero, and one in a thousand twenty times as large."""
    values = gaussian(groups, 1) * torch.logspace(-3, 0, groups).repeat_interleave(GROUP)
    values[::1000] *= 20
    values[7::500] = 0
    return values


def every_pattern() -> Tensor:
    """All 65536, sorted by exponent, so that a group has four of them."""
    patterns = torch.arange(1 << 16, dtype=torch.int32)
    return patterns[torch.argsort(patterns >> 7 & 0xFF, stable=True)].to(torch.int16)


def every_exponent_escaped() -> Tensor:
    """Groups of infinities with 51 other exponents each."""
    patterns = torch.full((5, GROUP), 0xFF << 7)
    patterns[:, 480:531] = torch.arange(255).view(5, 51) << 7
    return patterns.to(torch.int16).view(-1)


def with_escapes(*counts: int) -> Tensor:
    """A group of ones for each count, with so many far smaller values, all different, on both sides of its middle."""
    values = torch.ones(len(counts), GROUP)
    for row, count in enumerate(counts):
        places = (torch.arange(count) * 1021 + row) % GROUP
        values[row, places] = 2.0 ** -(20.0 + torch.arange(count) % 100)
    return values.view(-1)


RUNS = {
    "gaussian": lambda: gaussian(64) * 0.02,
    "like trained": lambda: like_trained(33),
    "every pattern": every_pattern,
    "every exponent escaped": every_exponent_escaped,
    "zeros": lambda: torch.zeros(3 * GROUP),
    "minus zeros": lambda: -torch.zeros(GROUP),
    "ones": lambda: torch.ones(GROUP),
    "subnormal": lambda: gaussian(2) * 1e-39,
    "NaN and infinity": lambda: torch.tensor([math.nan, -math.nan, math.inf, -math.inf]).repeat(GROUP // 4),
    "one NaN": lambda: torch.cat([torch.tensor([math.nan]), gaussian(1)[1:]]).masked_fill(gaussian(1, 5) < 2.5, 0),
    "lists of escapes": lambda: with_escapes(0, 1, ESCAPES, 2, ESCAPES - 1, 0, 0, 0, 0, 7),
    "nothing": lambda: torch.zeros(0),
}


def raw_of(values: Tensor) -> Tensor:
    return (values.bfloat16() if values.is_floating_point() else values).view(torch.uint8).to(DEVICE)


def both_ways(raw: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Packed bytes, what they unpack to, and the most escapes, of which reference and kernel say the same."""
    found = []
    for use_triton in (False, True):
        size = packed_bytes(len(raw) // 2)
        packed = torch.full((size + BEYOND,), 0xA5, dtype=torch.uint8, device=DEVICE)
        most = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        pack_(raw, packed, most, use_triton=use_triton)
        assert bool((packed[size:] == 0xA5).all())
        back = torch.full_like(raw, 0x5A)
        unpack_(packed, back, use_triton=use_triton)
        found.append((packed, back, most.tolist()))
    (packed, back, most_needed), theirs = found
    assert torch.equal(packed, theirs[0]) and torch.equal(back, theirs[1]) and most_needed == theirs[2]
    return packed[:-BEYOND], back, most_needed


def escapes(raw: Tensor) -> Tensor:
    """How many each group needs, told in another way: the non-zero exponents below the 14 upmost."""
    exponents, largest = exponents_of(raw)
    return ((exponents > 0) & (exponents <= largest - 14)).sum(1)


def nearly(raw: Tensor) -> Tensor:
    """How many it would need with a largest exponent that is 2 higher, and if zeros were small."""
    exponents, largest = exponents_of(raw)
    return ((exponents == 0) | (exponents <= largest - 12)).sum(1)


def exponents_of(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Of each pattern, and the largest of each group."""
    halves = raw.view(-1, GROUP, 2).to(torch.int32)
    exponents = (halves[..., 1] & 0x7F) * 2 + (halves[..., 0] >> 7)
    return exponents, exponents.amax(1, keepdim=True)


def told(raw: Tensor) -> list[int]:
    return [int(escapes(raw).max()), int(nearly(raw).max())] if len(raw) else [0, 0]


@pytest.mark.parametrize("name", RUNS)
def test_what_is_packed_comes_back_bit_for_bit(name):
    pytest.importorskip("triton")
    raw = raw_of(RUNS[name]())
    packed, back, most = both_ways(raw)
    assert most == told(raw) and most[0] <= ESCAPES
    assert torch.equal(back, raw)
    assert len(packed) == packed_bytes(len(raw) // 2) == len(raw) // 2 * 25 // 16


def test_without_triton_it_is_the_same():
    raw = raw_of(like_trained(33)).cpu()
    packed, most = torch.empty(packed_bytes(33 * GROUP), dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)
    pack_(raw, packed, most)
    back = torch.empty_like(raw)
    unpack_(packed, back)
    assert torch.equal(back, raw) and most.tolist() == told(raw) and 0 < most[0] < most[1]


def test_the_layout_is_as_written():
    values = torch.ones(2, GROUP)
    values[1, 3], values[1, 3 + 512], values[1, 5] = -(2.0**-20) * 1.5, 0.25, 0.0
    packed = torch.empty(packed_bytes(2 * GROUP), dtype=torch.uint8)
    pack_(values.view(-1).bfloat16().view(torch.uint8), packed, torch.zeros(2, dtype=torch.int32))
    marks, codes, heads = packed.split([2 * GROUP, GROUP, 128])
    assert marks.nonzero().flatten().tolist() == [GROUP + 3] and int(marks[GROUP + 3]) == 0x80 | 0x40
    assert {int(at): int(codes[at]) for at in codes.nonzero()} == {512 + 3: 2 << 4 | 15, 512 + 5: 14}
    assert heads.tolist() == [127, *[0] * 63, 127, 107, *[0] * 62]


def test_too_many_escapes_are_told_and_cost_only_those_beyond_the_list():
    pytest.importorskip("triton")
    counts = (3, ESCAPES + 1, 0, 200, ESCAPES)
    raw = raw_of(with_escapes(*counts))
    _, back, most = both_ways(raw)
    assert most == [200, 200] and escapes(raw).tolist() == list(counts)
    given, got = (one.view(torch.bfloat16).view(-1, GROUP).float() for one in (raw, back))
    for row, count in enumerate(counts):
        small = (given[row] < 0.5).nonzero().flatten()[ESCAPES:]
        expected = given[row].clone()
        expected[small] = 0
        assert len(small) == max(0, count - ESCAPES) and torch.equal(got[row], expected)


def test_bytes_of_fp32_and_of_chance_are_told_not_to_fit():
    pytest.importorskip("triton")
    chance = torch.randint(0, 256, (6 * GROUP,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    for raw in (chance.to(DEVICE), gaussian(4).view(torch.uint8).to(DEVICE)):
        _, _, most = both_ways(raw)
        assert most == told(raw) and most[0] > ESCAPES


def test_the_most_is_raised_and_never_lowered():
    pytest.importorskip("triton")
    most = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    seen = []
    for count in (2, 9, 0, 4):
        raw = raw_of(with_escapes(0, count, 1))
        packed = torch.empty(packed_bytes(3 * GROUP), dtype=torch.uint8, device=DEVICE)
        for use_triton in (False, True):
            pack_(raw, packed, most, use_triton=use_triton)
            seen.append(most.tolist())
    assert seen == [[count, count] for count in (2, 2, 9, 9, 9, 9, 9, 9)]


def test_a_part_of_a_larger_buffer_is_written_and_nothing_beside_it():
    pytest.importorskip("triton")
    raw = raw_of(like_trained(5))
    whole = torch.full((len(raw) + 512,), 0x77, dtype=torch.uint8, device=DEVICE)
    packed = torch.empty(packed_bytes(5 * GROUP), dtype=torch.uint8, device=DEVICE)
    pack_(raw, packed, torch.zeros(2, dtype=torch.int32, device=DEVICE), use_triton=True)
    unpack_(packed, whole[256:-256], use_triton=True)
    assert same_bits(whole[256:-256], raw)
    assert bool((whole[:256] == 0x77).all()) and bool((whole[-256:] == 0x77).all())


def test_the_reference_goes_through_a_long_run_in_pieces(monkeypatch):
    raw = raw_of(like_trained(11)).cpu()
    wholes = []
    for groups in (module.PIECE_GROUPS, 4):
        monkeypatch.setattr(module, "PIECE_GROUPS", groups)
        packed, most = torch.empty(packed_bytes(11 * GROUP), dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)
        pack_(raw, packed, most)
        back = torch.empty_like(raw)
        unpack_(packed, back)
        assert torch.equal(back, raw)
        wholes.append((packed, most.tolist()))
    assert torch.equal(wholes[0][0], wholes[1][0]) and wholes[0][1] == wholes[1][1]


def test_sizes_that_do_not_fit_are_refused():
    raw, packed = torch.zeros(2 * GROUP, dtype=torch.uint8), torch.zeros(packed_bytes(GROUP), dtype=torch.uint8)
    most = torch.zeros(2, dtype=torch.int32)
    for wrong, message in (
        ((raw[:-1], packed), "2047 bytes. Pass two for each"),
        ((raw[:-2], packed), "1023 elements are no whole number of groups"),
        ((raw, packed[:-1]), "`packed` has 1599 bytes. 1024 elements need 1600"),
        ((raw.view(torch.int16), packed), r"`raw` is \(1024,\) of torch.int16"),
        ((raw.view(2, -1), packed), "Pass a flat"),
        ((raw, packed.repeat(2)[::2]), "Pass a flat contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_(*wrong, most)
        with pytest.raises(ValueError, match=message):
            unpack_(wrong[1], wrong[0])
    for bad in (most.long(), torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)[::2]):
        with pytest.raises(ValueError, match="Pass a contiguous tensor of two int32"):
            pack_(raw, packed, bad)
    for elements in (-GROUP, 1000):
        with pytest.raises(ValueError, match="Pad them to a multiple of 1024"):
            packed_bytes(elements)
