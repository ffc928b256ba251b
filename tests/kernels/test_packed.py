"""Packed patterns come back bit for bit, by Triton and by the reference, which agree in every byte."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.device import DEVICE
from tests.kernels.making import same_bits
from torch import Tensor

from hybridtrainer.kernels import packed as module
from hybridtrainer.kernels.packed import ESCAPES, GROUP, REST_BYTES, count_escapes_, pack_, packed_bytes, unpack_

BEYOND = 64  # bytes after each buffer, which nobody may write
MARK = 0xA5  # what they hold


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


class Buffers:
    """What a run is packed into, with bytes after each."""

    def __init__(self, raw: Tensor) -> None:
        groups = len(raw) // (2 * GROUP)
        self.sizes = (packed_bytes(len(raw) // 2), groups * REST_BYTES, groups)
        self.all = [torch.full((size + BEYOND,), MARK, dtype=torch.uint8, device=raw.device) for size in self.sizes]
        self.packed, self.rest, self.whole = (found[:-BEYOND] for found in self.all)
        self.most = torch.zeros(1, dtype=torch.int32, device=raw.device)

    def pack(self, raw: Tensor, use_triton: bool | None = None) -> Buffers:
        pack_(raw, self.packed, self.rest, self.whole, self.most, use_triton)
        assert all(bool((found[-BEYOND:] == MARK).all()) for found in self.all)
        return self

    def unpack(self, use_triton: bool | None = None) -> Tensor:
        back = torch.full((2 * GROUP * len(self.whole),), 0x5A, dtype=torch.uint8, device=self.packed.device)
        unpack_(self.packed, self.rest, self.whole, back, use_triton)
        return back


def both_ways(raw: Tensor) -> tuple[Buffers, int]:
    """What a run is packed into, of which reference and kernel say the same, and the most escapes of a group."""
    found = [Buffers(raw).pack(raw, use_triton) for use_triton in (False, True)]
    for one, other in zip(found[0].all, found[1].all, strict=True):
        assert torch.equal(one, other)
    counted = [torch.zeros(1, dtype=torch.int32, device=raw.device) for _ in found]
    for most, use_triton in zip(counted, (False, True), strict=True):
        count_escapes_(raw, most, use_triton)
    assert len({int(most) for most in (*counted, found[0].most, found[1].most)}) == 1
    for use_triton in (False, True):
        assert torch.equal(found[0].unpack(use_triton), raw)
    return found[1], int(counted[0])


def escapes(raw: Tensor) -> Tensor:
    """How many each group needs, told in another way: the non-zero exponents below the 14 upmost."""
    exponents, largest = exponents_of(raw)
    return ((exponents > 0) & (exponents <= largest - 14)).sum(1)


def exponents_of(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Of each pattern, and the largest of each group."""
    halves = raw.view(-1, GROUP, 2).to(torch.int32)
    exponents = (halves[..., 1] & 0x7F) * 2 + (halves[..., 0] >> 7)
    return exponents, exponents.amax(1, keepdim=True)


def told(raw: Tensor) -> int:
    return int(escapes(raw).max()) if len(raw) else 0


@pytest.mark.parametrize("name", RUNS)
def test_what_is_packed_comes_back_bit_for_bit(name):
    pytest.importorskip("triton")
    raw = raw_of(RUNS[name]())
    found, most = both_ways(raw)
    assert most == told(raw) <= ESCAPES
    assert not found.whole.any() and bool((found.rest == MARK).all())
    assert len(found.packed) == len(raw) // 2 * 25 // 16


def test_without_triton_it_is_the_same():
    raw = raw_of(like_trained(33)).cpu()
    found = Buffers(raw).pack(raw)
    assert torch.equal(found.unpack(), raw) and 0 < int(found.most) == told(raw)
    most = torch.zeros(1, dtype=torch.int32)
    count_escapes_(raw, most)
    assert most == found.most


def test_the_layout_is_as_written():
    values = torch.ones(3, GROUP)
    values[1, 3], values[1, 3 + 512], values[1, 5] = -(2.0**-20) * 1.5, 0.25, 0.0
    values[2] = 2.0 ** -(torch.arange(GROUP) % 100)
    raw = values.view(-1).bfloat16().view(torch.uint8)
    found = Buffers(raw).pack(raw)
    marks, codes, heads = found.packed.split([3 * GROUP, 3 * GROUP // 2, 3 * 64])
    assert marks.nonzero().flatten().tolist() == [GROUP + 3] and int(marks[GROUP + 3]) == 0x80 | 0x40
    of_groups = codes[: 2 * 512]
    assert {int(at): int(of_groups[at]) for at in of_groups.nonzero()} == {512 + 3: 2 << 4 | 15, 512 + 5: 14}
    assert heads[:128].tolist() == [127, *[0] * 63, 127, 107, *[0] * 62]
    assert found.whole.tolist() == [0, 0, 1]
    exponents = [*codes[2 * 512 :].tolist(), *heads[128:].tolist(), *found.rest[2 * REST_BYTES :].tolist()]
    assert exponents == [127 - at % 100 for at in range(GROUP)]


def test_groups_with_too_many_escapes_are_whole_and_the_others_are_not():
    pytest.importorskip("triton")
    counts = (3, ESCAPES + 1, 0, 200, ESCAPES, *[0] * 8, 1000, 1, 1, 1)
    raw = raw_of(with_escapes(*counts))
    found, most = both_ways(raw)
    assert most == 1000 and escapes(raw).tolist() == list(counts)
    assert found.whole.tolist() == [count > ESCAPES for count in counts]
    unused = found.rest.view(-1, REST_BYTES)[found.whole == 0]
    assert bool((unused == MARK).all())


def test_bytes_of_fp32_and_of_chance_are_told_not_to_fit():
    pytest.importorskip("triton")
    chance = torch.randint(0, 256, (6 * GROUP,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    for raw in (chance.to(DEVICE), gaussian(4).view(torch.uint8).to(DEVICE)):
        _, most = both_ways(raw)
        assert most == told(raw) > ESCAPES


def test_the_most_is_raised_and_never_lowered():
    pytest.importorskip("triton")
    most = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    seen = []
    for count in (2, 9, 0, 4):
        raw = raw_of(with_escapes(0, count, 1))
        found = Buffers(raw)
        found.most = most
        for use_triton in (False, True):
            found.pack(raw, use_triton)
            count_escapes_(raw, most, use_triton)
            seen.append(int(most))
    assert seen == [2, 2, 9, 9, 9, 9, 9, 9]


def test_a_part_of_a_larger_buffer_is_written_and_nothing_beside_it():
    pytest.importorskip("triton")
    raw = raw_of(torch.cat([like_trained(5), with_escapes(ESCAPES + 1, 1)]))
    whole = torch.full((len(raw) + 512,), 0x77, dtype=torch.uint8, device=DEVICE)
    found = Buffers(raw).pack(raw, use_triton=True)
    unpack_(found.packed, found.rest, found.whole, whole[256:-256], use_triton=True)
    assert same_bits(whole[256:-256], raw)
    assert bool((whole[:256] == 0x77).all()) and bool((whole[-256:] == 0x77).all())


def test_the_reference_goes_through_a_long_run_in_pieces(monkeypatch):
    raw = raw_of(torch.cat([like_trained(9), with_escapes(ESCAPES + 1, 1)])).cpu()
    found = []
    for groups in (module.PIECE_GROUPS, 4):
        monkeypatch.setattr(module, "PIECE_GROUPS", groups)
        found.append(Buffers(raw).pack(raw))
        assert torch.equal(found[-1].unpack(), raw)
    assert all(torch.equal(one, other) for one, other in zip(found[0].all, found[1].all, strict=True))
    assert found[0].most == found[1].most == ESCAPES + 1


def test_sizes_that_do_not_fit_are_refused():
    raw = torch.zeros(2 * GROUP, dtype=torch.uint8)
    packed, rest, whole = torch.zeros(packed_bytes(GROUP), dtype=torch.uint8), raw[:REST_BYTES], raw[:1]
    most = torch.zeros(1, dtype=torch.int32)
    for wrong, message in (
        ((raw[:-1], packed, rest, whole), "2047 bytes. Pass two for each"),
        ((raw[:-2], packed, rest, whole), "1023 elements are no whole number of groups"),
        ((raw, packed[:-1], rest, whole), "`packed` has 1599 bytes. 1024 elements need 1600"),
        ((raw, packed, rest[:-1], whole), "`rest` has 447 bytes. 1 groups need 448"),
        ((raw, packed, rest, raw[:2]), "`whole` has 2 bytes. 1 groups need 1"),
        ((raw.view(torch.int16), packed, rest, whole), r"`raw` is \(1024,\) of torch.int16"),
        ((raw.view(2, -1), packed, rest, whole), "Pass a flat"),
        ((raw, packed.repeat(2)[::2], rest, whole), "Pass a flat contiguous"),
        ((raw, packed, rest.view(torch.int8), whole), "`rest` is .*Pass a flat"),
        ((raw, packed, rest, whole.bool()), "`whole` is .*Pass a flat"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_(*wrong, most)
        with pytest.raises(ValueError, match=message):
            unpack_(*wrong[1:], wrong[0])
        if wrong[0] is not raw:
            with pytest.raises(ValueError, match=message):
                count_escapes_(wrong[0], most)
    for bad in (most.long(), torch.zeros(2, dtype=torch.int32), most[0]):
        for work in (lambda bad: pack_(raw, packed, rest, whole, bad), lambda bad: count_escapes_(raw, bad)):
            with pytest.raises(ValueError, match="Pass a tensor of one int32"):
                work(bad)
    for elements in (-GROUP, 1000):
        with pytest.raises(ValueError, match="Pad them to a multiple of 1024"):
            packed_bytes(elements)
