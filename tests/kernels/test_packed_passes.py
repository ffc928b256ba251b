"""The passes compute with two patterns in a word, and with any number of groups to a program."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.device import DEVICE
from tests.kernels.test_packed import Buffers, raw_of, with_escapes
from torch import Tensor

from hybridtrainer.kernels import packed
from hybridtrainer.kernels.packed import ESCAPES, GROUP, count_escapes_

pytest.importorskip("triton")
import triton.language as tl

from hybridtrainer.kernels import packed_passes as passes
from hybridtrainer.kernels.quant import jit


@jit
def halves_kernel(words, marks, back, bytes_, halves, is_above, counted, COUNT: tl.constexpr, LIMIT: tl.constexpr):
    at = tl.arange(0, COUNT)
    word = tl.load(words + at)
    mark = passes.marks_of(word)
    tl.store(marks + at, mark)
    tl.store(back + at, passes.spread(mark.to(tl.int32)))
    exponents = (word >> 7) & 0x00FF00FF
    both = passes.in_bytes(exponents)
    tl.store(bytes_ + at, both)
    tl.store(halves + at, passes.in_halves(both))
    found = passes.above(exponents, LIMIT)
    tl.store(is_above + at, found)
    tl.store(counted + at, passes.in_word(found) + 10 * passes.in_word(passes.not_above(exponents, LIMIT)))


def split(words: Tensor) -> tuple[Tensor, Tensor]:
    """The patterns of each word, the low one first."""
    return words.long() & 0xFFFF, words.long() >> 16 & 0xFFFF


def test_both_halves_of_a_word_are_computed_with_apart():
    limit = 13
    words = torch.randint(-(2**31), 2**31, (1024,), generator=torch.Generator().manual_seed(0)).int()
    words[:4] = torch.tensor([0, -1, 0x3F803F80, -0x7F80_0000])
    found = [torch.zeros(1024, dtype=torch.int16, device=DEVICE)]
    found += [torch.zeros(1024, dtype=torch.int32, device=DEVICE) for _ in range(5)]
    halves_kernel[(1,)](words.to(DEVICE), *found, COUNT=1024, LIMIT=limit)
    marks, back, in_bytes, in_halves, is_above, counted = (one.cpu().long() for one in found)
    low, high = split(words)
    of_low, of_high = (one >> 7 & 0xFF for one in (low, high))
    for half, mark, kept in ((low, marks & 0xFF, back & 0xFFFF), (high, marks >> 8 & 0xFF, back >> 16 & 0xFFFF)):
        assert torch.equal(mark, half >> 8 & 0x80 | half & 0x7F)
        assert torch.equal(kept, half & 0x807F)
    assert torch.equal(in_bytes, of_low | of_high << 8)
    assert torch.equal(in_halves, of_low | of_high << 16)
    more = ((of_low > limit).long(), (of_high > limit).long())
    assert torch.equal(is_above, more[0] | more[1] << 16)
    assert torch.equal(counted, more[0] + more[1] + 10 * (2 - more[0] - more[1]))


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_programs_of_several_groups_do_the_same_and_stop_at_the_last(monkeypatch, rows):
    raw = raw_of(with_escapes(0, 1, ESCAPES + 1, 0, 7, 300, ESCAPES))
    expected = Buffers(raw).pack(raw, use_triton=False)
    monkeypatch.setattr(packed, "ROWS", rows)
    found = Buffers(raw).pack(raw, use_triton=True)
    assert all(torch.equal(one, other) for one, other in zip(found.all, expected.all, strict=True))
    assert torch.equal(found.unpack(use_triton=True), raw)
    counted = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    count_escapes_(raw, counted, use_triton=True)
    assert counted == found.most == 300
    assert len(found.whole) % rows and len(raw) == 2 * GROUP * len(found.whole)
