"""The passes of `packed.py` in Triton.

Two patterns are computed with at a time, in the halves of a word: sums of what is in a half do not leave it, and its
bit 12 says that a comparison holds.
"""

from __future__ import annotations

from hybridtrainer.kernels.quant import jit

try:
    import triton.language as tl
    from triton.language import constexpr, tensor
except ImportError:
    tl = constexpr = tensor = None

HAS_TRITON = tl is not None


@jit
def pack_pass(
    words: tensor, marks: tensor, codes: tensor, heads: tensor, rest: tensor, whole: tensor, most: tensor,
    groups: tensor, HALF: constexpr, ROWS: constexpr, ESCAPES: constexpr, OF_ZERO: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """mark = sign << 7 | mantissa; code = base - exponent, or what stands for 0 or an escape; head = base, escapes.

    Codes are put right, ranks computed and whole groups laid down where a program has to.
    """
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = group < groups
    lane = tl.arange(0, HALF)[None, :]
    place = group[:, None] * (2 * HALF) + lane
    first = tl.load(words + place, inside[:, None], 0x3F803F80)
    second = tl.load(words + place + HALF, inside[:, None], 0x3F803F80)
    tl.store(marks + place, marks_of(first), inside[:, None])
    tl.store(marks + place + HALF, marks_of(second), inside[:, None])

    first, second = (first >> 7) & 0x00FF00FF, (second >> 7) & 0x00FF00FF
    base = largest(first, second)
    code, other = base[:, None] * 0x00010001 - first, base[:, None] * 0x00010001 - second
    # In bit 0 of each half: whether the exponent is 0; whether it needs an escape.
    zero, other_zero = not_above(first, 0), not_above(second, 0)
    escaped, other_escaped = above(code, OF_ZERO - 1) & ~zero, above(other, OF_ZERO - 1) & ~other_zero
    special = tl.max(tl.max(zero | other_zero | escaped | other_escaped, axis=1), axis=0)
    needed = special * 0
    is_whole = base < 0
    if special > 0:
        # Escapes of the first half of a group are counted in the low 16 bits, those of the second in the high ones.
        both = in_word(escaped) | (in_word(other_escaped) << 16)
        counted = tl.sum(both, axis=1)
        of_group = (counted & 0xFFFF) + (counted >> 16)
        needed = tl.max(of_group, axis=0)
        is_whole = of_group > ESCAPES
        code = (code & (0x000F000F - 15 * (zero | escaped))) | (OF_ZERO * zero) | (15 * escaped)
        other = (
            (other & (0x000F000F - 15 * (other_zero | other_escaped))) | (OF_ZERO * other_zero) | (15 * other_escaped)
        )
        if needed > 0:
            low, high, other_low, other_high = ranks(escaped, other_escaped, both, counted)
            head = heads + group * (1 + ESCAPES)
            for slot in range(1, tl.minimum(needed, ESCAPES) + 1):
                of_slot = tl.where(low == slot, first & 0xFF, 0) + tl.where(high == slot, first >> 16, 0)
                of_slot += tl.where(other_low == slot, second & 0xFF, 0) + tl.where(other_high == slot, second >> 16, 0)
                tl.store(head + slot, tl.sum(of_slot, axis=1).to(tl.uint8), inside & ~is_whole)
            # Seldom, so that programs do not queue at one address; an old value does no harm.
            if needed > tl.load(most):
                tl.atomic_max(most, needed, sem="relaxed")
    code |= other << 4
    code = in_bytes(code)
    if needed > ESCAPES:
        kept, other_kept = in_bytes(first), in_bytes(second)
        code = tl.where(is_whole[:, None], kept, code)
        of_head = lane < (1 + ESCAPES) // 2
        shown = (inside & is_whole)[:, None]
        target = heads.to(tl.pointer_type(tl.int16)) + group[:, None] * ((1 + ESCAPES) // 2) + lane
        tl.store(target, other_kept.to(tl.int16), shown & of_head)
        beyond = rest + group[:, None] * (HALF - (1 + ESCAPES) // 2) + lane - (1 + ESCAPES) // 2
        tl.store(beyond, other_kept.to(tl.int16), shown & ~of_head)
    tl.store(codes + group[:, None] * HALF + lane, code.to(tl.int16), inside[:, None])
    tl.store(whole + group, is_whole.to(tl.uint8), inside)
    # The slots of the loop above are left out: no byte is written by two threads, which come in any order.
    slots = tl.arange(0, 1 + ESCAPES)[None, :]
    unused = tl.where(slots == 0, base[:, None], 0).to(tl.uint8)
    target = heads + group[:, None] * (1 + ESCAPES) + slots
    tl.store(target, unused, (inside & ~is_whole)[:, None] & ((slots == 0) | (slots > needed)))


@jit
def unpack_pass(
    words: tensor, marks: tensor, codes: tensor, heads: tensor, rest: tensor, whole: tensor, groups: tensor,
    HALF: constexpr, ROWS: constexpr, ESCAPES: constexpr, OF_ZERO: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """pattern = sign << 15 | exponent << 7 | mantissa, with the exponent that its code tells; two in a word."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = group < groups
    lane = tl.arange(0, HALF)[None, :]
    place = group[:, None] * (2 * HALF) + lane
    coded = tl.load(codes + group[:, None] * HALF + lane, inside[:, None], 0).to(tl.int32)
    mark = tl.load(marks + place, inside[:, None], 0).to(tl.int32)
    other_mark = tl.load(marks + place + HALF, inside[:, None], 0).to(tl.int32)
    head = heads + group * (1 + ESCAPES)
    base = tl.load(head, inside, 0).to(tl.int32)[:, None] * 0x00010001
    is_whole = tl.load(whole + group, inside, 0) > 0

    coded = in_halves(coded)
    code, other = coded & 0x000F000F, (coded >> 4) & 0x000F000F
    special, other_special = above(code, OF_ZERO - 1), above(other, OF_ZERO - 1)
    # What is special has an exponent of 0, until its list says otherwise; its code is above what can be subtracted.
    first = (base - (code & (0x000F000F - 15 * special))) & (0x00FF00FF - 255 * special)
    second = (base - (other & (0x000F000F - 15 * other_special))) & (0x00FF00FF - 255 * other_special)
    if tl.max(tl.max(special | other_special, axis=1), axis=0) > 0:
        escaped, other_escaped = above(code, OF_ZERO), above(other, OF_ZERO)
        both = in_word(escaped) | (in_word(other_escaped) << 16)
        counted = tl.sum(both, axis=1)
        most = tl.max((counted & 0xFFFF) + (counted >> 16), axis=0)
        if most > 0:
            low, high, other_low, other_high = ranks(escaped, other_escaped, both, counted)
            for slot in range(1, tl.minimum(most, ESCAPES) + 1):
                listed = tl.load(head + slot, inside, 0).to(tl.int32)[:, None]
                first |= tl.where(low == slot, listed, 0) | tl.where(high == slot, listed << 16, 0)
                second |= tl.where(other_low == slot, listed, 0) | tl.where(other_high == slot, listed << 16, 0)
    if tl.max(is_whole.to(tl.int32), axis=0) > 0:
        of_head = lane < (1 + ESCAPES) // 2
        shown = (inside & is_whole)[:, None]
        source = heads.to(tl.pointer_type(tl.int16)) + group[:, None] * ((1 + ESCAPES) // 2) + lane
        kept = tl.load(source, shown & of_head, 0).to(tl.int32)
        beyond = rest + group[:, None] * (HALF - (1 + ESCAPES) // 2) + lane - (1 + ESCAPES) // 2
        kept |= tl.load(beyond, shown & ~of_head, 0).to(tl.int32)
        first = tl.where(is_whole[:, None], coded, first)
        second = tl.where(is_whole[:, None], in_halves(kept), second)
    tl.store(words + place, (first << 7) | spread(mark), inside[:, None])
    tl.store(words + place + HALF, (second << 7) | spread(other_mark), inside[:, None])


@jit
def count_pass(
    words: tensor, most: tensor, groups: tensor, HALF: constexpr, ROWS: constexpr, OF_ZERO: constexpr  # noqa: N803
) -> None:  # fmt: skip
    """most = the most escapes of a group, or what it is."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = group[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    first = (tl.load(words + place, (group < groups)[:, None], 0x3F803F80) >> 7) & 0x00FF00FF
    second = (tl.load(words + place + HALF, (group < groups)[:, None], 0x3F803F80) >> 7) & 0x00FF00FF
    base = largest(first, second)[:, None] * 0x00010001
    escaped = above(base - first, OF_ZERO - 1) & ~not_above(first, 0)
    other_escaped = above(base - second, OF_ZERO - 1) & ~not_above(second, 0)
    needed = tl.max(tl.sum(in_word(escaped) + in_word(other_escaped), axis=1), axis=0)
    if needed > tl.load(most):
        tl.atomic_max(most, needed, sem="relaxed")


@jit
def largest(first: tensor, second: tensor) -> tensor:
    """The largest exponent of each row."""
    larger = tl.maximum(tl.maximum(first & 0xFF, first >> 16), tl.maximum(second & 0xFF, second >> 16))
    return tl.max(larger, axis=1)


@jit
def in_bytes(halves: tensor) -> tensor:
    """What is in both halves of a word, a byte each."""
    return (halves & 0xFF) | (halves >> 8)


@jit
def in_halves(both: tensor) -> tensor:
    """The same again in the halves of a word."""
    return (both & 0xFF) | ((both & 0xFF00) << 8)


@jit
def marks_of(word: tensor) -> tensor:
    """Sign and mantissa of both patterns of a word, a byte each."""
    low = ((word >> 8) & 0x80) | (word & 0x7F)
    return (low | ((word >> 16) & 0x8000) | ((word >> 8) & 0x7F00)).to(tl.int16)


@jit
def spread(mark: tensor) -> tensor:
    """The same, where they belong in a word."""
    low = ((mark & 0x80) << 8) | (mark & 0x7F)
    return low | ((mark & 0x8000) << 16) | ((mark & 0x7F00) << 8)


@jit
def above(halves: tensor, LIMIT: constexpr) -> tensor:  # noqa: N803
    """1 in each half that is above the limit; both are less than 4096."""
    return ((halves + (4095 - LIMIT) * 0x00010001) >> 12) & 0x00010001


@jit
def not_above(halves: tensor, LIMIT: constexpr) -> tensor:  # noqa: N803
    """1 in each half that is not."""
    return above(halves, LIMIT) ^ 0x00010001


@jit
def in_word(halves: tensor) -> tensor:
    """How many of a word's two halves are 1."""
    return (halves & 1) + (halves >> 16)


@jit
def ranks(escaped: tensor, other_escaped: tensor, both: tensor, counted: tensor) -> tensor:
    """Of the escapes of each row, from 1, which is their slot in the head; 0 of what is none.

    Of the low and high patterns of the words of the first half, and of those of the second.
    """
    up_to = tl.cumsum(both, axis=1)
    before = up_to - both
    second = (counted & 0xFFFF)[:, None]
    low = tl.where((escaped & 1) == 1, (before & 0xFFFF) + 1, 0)
    high = tl.where((escaped >> 16) == 1, up_to & 0xFFFF, 0)
    other_low = tl.where((other_escaped & 1) == 1, (before >> 16) + second + 1, 0)
    other_high = tl.where((other_escaped >> 16) == 1, (up_to >> 16) + second, 0)
    return low, high, other_low, other_high
