"""bf16 in 12.5 bits without loss: the exponents of neighbours are nearly equal, and 4 bits tell them apart.

Of each group of 1024 patterns a head of 64 bytes has the largest exponent and a list of at most 63 exponents. A pattern
keeps its sign and mantissa in a byte, and a code: 0 to 13 are so many below the largest exponent; 14 is the exponent 0,
of zeros and subnormals; 15, an escape, is the next of the list. Signs with mantissas, codes and heads are a plane each,
one after the other. Patterns i and i + 512 of a group share a byte of codes, the first in the low half.

Any 16 bits come back as they were, those of NaNs included, where no group needs more escapes than its list holds. What
the bits mean, and what to do where a list is too short, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridtrainer.kernels.quant import jit

try:
    import triton.language as tl
    from triton.language import constexpr, tensor
except ImportError:
    tl = constexpr = tensor = None

GROUP = 1024  # patterns that share a head
ESCAPES = 63  # exponents that a head lists
HEAD_BYTES = 1 + ESCAPES
OF_ZERO, ESCAPED = 14, 15  # codes
SPARE = 2  # exponents; what is so close to an escape is counted too
# Groups of one program, and its warps. One of each is a third faster on an idle GPU and slower beside a computation:
# see docs/LOG.md.
ROWS, WARPS = 4, 4
Planes = tuple[Tensor, Tensor, Tensor, Tensor]
# The reference goes through a run in pieces, so that its temporaries stay small.
PIECE_GROUPS = 4096


def packed_bytes(elements: int) -> int:
    """What so many patterns take when packed: 1600 bytes for 1024.

    >>> packed_bytes(1024)
    1600
    """
    if elements < 0 or elements % GROUP:
        raise ValueError(f"{elements} elements are no whole number of groups. Pad them to a multiple of {GROUP}.")
    return elements + elements // 2 + elements // GROUP * HEAD_BYTES


def pack_(raw: Tensor, packed: Tensor, most: Tensor, use_triton: bool | None = None) -> None:
    """Packs a run of 16-bit patterns. On a GPU nothing waits for the device.

    Where a group needs more than ESCAPES escapes, those beyond come back with the exponent 0, and the rest exactly.

    Args:
        raw: Flat uint8, two bytes for each pattern, a multiple of GROUP patterns.
        packed: Flat uint8 of at least `packed_bytes(patterns)`; what is beyond them is left alone.
        most: Two int32, raised to the most escapes that any group needs, and to the most that it would need if its
            largest pattern were four times as large and zeros were small. The packing is exact where the first is at
            most ESCAPES.
        use_triton: Whether the kernel runs; by default for CUDA tensors. On a CPU it needs Triton's interpreter.

    Raises:
        ValueError: where a tensor has another size or type.

    >>> weights = torch.linspace(-1, 1, 1024).bfloat16()
    >>> packed, most = torch.empty(packed_bytes(1024), dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)
    >>> pack_(weights.view(torch.uint8), packed, most)
    >>> back = torch.empty_like(weights)
    >>> unpack_(packed, back.view(torch.uint8))
    >>> torch.equal(back, weights), most.tolist()
    (True, [0, 0])
    """
    if most.dtype != torch.int32 or most.shape != (2,) or not most.is_contiguous():
        raise ValueError(f"`most` is {tuple(most.shape)} of {most.dtype}. Pass a contiguous tensor of two int32.")
    patterns, marks, codes, heads = _planes(raw, packed)
    groups = len(heads) // HEAD_BYTES
    if not ((raw.is_cuda and tl is not None) if use_triton is None else use_triton):
        for piece in _pieces(patterns, marks, codes, heads):
            _pack_piece_(*piece, most)
    elif groups:
        pack_pass[(-(-groups // ROWS),)](
            patterns.view(torch.int32), marks.view(torch.int16), codes.view(torch.int16), heads, most, groups,
            HALF=GROUP // 4, ROWS=ROWS, ESCAPES=ESCAPES, OF_ZERO=OF_ZERO, CLOSE=OF_ZERO - SPARE, num_warps=WARPS,
        )  # fmt: skip


def unpack_(packed: Tensor, raw: Tensor, use_triton: bool | None = None) -> None:
    """Writes the patterns that `pack_` was given.

    Args:
        packed: Flat uint8 of at least `packed_bytes(patterns)`.
        raw: Flat uint8, two bytes for each pattern: as many as were packed.
        use_triton: Whether the kernel runs; by default for CUDA tensors. On a CPU it needs Triton's interpreter.

    Raises:
        ValueError: where a tensor has another size or type.
    """
    patterns, marks, codes, heads = _planes(raw, packed)
    groups = len(heads) // HEAD_BYTES
    if not ((raw.is_cuda and tl is not None) if use_triton is None else use_triton):
        for piece in _pieces(patterns, marks, codes, heads):
            _unpack_piece_(*piece)
    elif groups:
        unpack_pass[(-(-groups // ROWS),)](
            patterns.view(torch.int32), marks.view(torch.int16), codes.view(torch.int16), heads, groups,
            HALF=GROUP // 4, ROWS=ROWS, ESCAPES=ESCAPES, OF_ZERO=OF_ZERO, num_warps=WARPS,
        )  # fmt: skip


def _planes(raw: Tensor, packed: Tensor) -> Planes:
    """The patterns as int16; signs with mantissas, codes and heads as bytes."""
    for name, flat in (("raw", raw), ("packed", packed)):
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(
                f"`{name}` is {tuple(flat.shape)} of {flat.dtype}. Pass a flat contiguous tensor of uint8: "
                "tensor.view(-1).view(torch.uint8)."
            )
    if raw.numel() % 2:
        raise ValueError(f"`raw` has {raw.numel()} bytes. Pass two for each pattern.")
    elements = raw.numel() // 2
    needed = packed_bytes(elements)
    if packed.numel() < needed:
        raise ValueError(f"`packed` has {packed.numel()} bytes. {elements} elements need {needed}.")
    codes_end = elements + elements // 2
    return raw.view(torch.int16), packed[:elements], packed[elements:codes_end], packed[codes_end:needed]


def _pieces(patterns: Tensor, marks: Tensor, codes: Tensor, heads: Tensor) -> Iterator[Planes]:
    """All four in parts of PIECE_GROUPS groups, a row for each group."""
    patterns, marks, codes = patterns.view(-1, GROUP), marks.view(-1, GROUP), codes.view(-1, GROUP // 2)
    heads = heads.view(-1, HEAD_BYTES)
    for start in range(0, len(heads), PIECE_GROUPS):
        piece = slice(start, start + PIECE_GROUPS)
        yield patterns[piece], marks[piece], codes[piece], heads[piece]


def _pack_piece_(patterns: Tensor, marks: Tensor, codes: Tensor, heads: Tensor, most: Tensor) -> None:
    bits = patterns.to(torch.int32)
    marks.copy_((bits >> 8 & 0x80) | (bits & 0x7F))
    exponent = bits >> 7 & 0xFF
    base = exponent.amax(1, keepdim=True)
    below = base - exponent
    escaped = (exponent != 0) & (below >= OF_ZERO)
    rank = escaped.cumsum(1)  # from 1, which is the place in the head: the base is at 0
    close = ((exponent == 0) | (below >= OF_ZERO - SPARE)).sum(1)
    most.copy_(torch.maximum(most, torch.stack([rank[:, -1].amax(), close.amax()])))
    listed = escaped & (rank <= ESCAPES)
    code = torch.where(listed, ESCAPED, torch.where(escaped | (exponent == 0), OF_ZERO, below))
    first, second = code.chunk(2, dim=1)
    codes.copy_(first | second << 4)
    wide = torch.zeros(len(heads), HEAD_BYTES + 1, dtype=torch.int32, device=heads.device)  # the last is for nothing
    wide.scatter_(1, torch.where(listed, rank, HEAD_BYTES), exponent)
    wide[:, :1] = base
    heads.copy_(wide[:, :HEAD_BYTES])


def _unpack_piece_(patterns: Tensor, marks: Tensor, codes: Tensor, heads: Tensor) -> None:
    code = torch.cat([codes & 15, codes >> 4], 1).to(torch.int32)
    wide = heads.to(torch.int32)
    escaped = code == ESCAPED
    listed = wide.gather(1, torch.where(escaped, escaped.cumsum(1).clamp(max=ESCAPES), 0))
    exponent = torch.where(escaped, listed, torch.where(code == OF_ZERO, 0, wide[:, :1] - code))
    mark = marks.to(torch.int32)
    patterns.copy_((mark & 0x80) << 8 | exponent << 7 | (mark & 0x7F))


@jit
def pack_pass(
    words: tensor, marks: tensor, codes: tensor, heads: tensor, most: tensor, groups: tensor,
    HALF: constexpr, ROWS: constexpr, ESCAPES: constexpr, OF_ZERO: constexpr, CLOSE: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """mark = sign << 7 | mantissa; code = base - exponent, or what stands for 0 or an escape; head = base, escapes.

    Two patterns are computed with at a time, in the halves of a word: sums of what is in a half do not leave it, and
    its bit 12 says that a comparison holds. Codes are put right and ranks computed where a program has to.
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
    larger = tl.maximum(tl.maximum(first & 0xFF, first >> 16), tl.maximum(second & 0xFF, second >> 16))
    base = tl.max(larger, axis=1)
    code, other = base[:, None] * 0x00010001 - first, base[:, None] * 0x00010001 - second
    # In bit 0 of each half: whether the exponent is 0; whether it needs an escape; whether it nearly does.
    zero, other_zero = not_above(first, 0), not_above(second, 0)
    escaped, other_escaped = above(code, OF_ZERO - 1) & ~zero, above(other, OF_ZERO - 1) & ~other_zero
    close = (above(code, CLOSE - 1) | zero) + (above(other, CLOSE - 1) | other_zero)
    closest = tl.max(tl.sum((close & 0xFFFF) + (close >> 16), axis=1), axis=0)
    needed = closest * 0
    if closest > 0:
        # Escapes of the first half of a group are counted in the low 16 bits, those of the second in the high ones.
        both = in_word(escaped) | (in_word(other_escaped) << 16)
        counted = tl.sum(both, axis=1)
        needed = tl.max((counted & 0xFFFF) + (counted >> 16), axis=0)
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
                tl.store(head + slot, tl.sum(of_slot, axis=1).to(tl.uint8), inside)
            code -= (low > ESCAPES).to(tl.int32) | ((high > ESCAPES).to(tl.int32) << 16)
            other -= (other_low > ESCAPES).to(tl.int32) | ((other_high > ESCAPES).to(tl.int32) << 16)
        # Seldom, so that programs do not queue at one address; an old value does no harm.
        if needed > tl.load(most):
            tl.atomic_max(most, needed, sem="relaxed")
        if closest > tl.load(most + 1):
            tl.atomic_max(most + 1, closest, sem="relaxed")
    code |= other << 4
    tl.store(codes + group[:, None] * HALF + lane, ((code & 0xFF) | (code >> 8)).to(tl.int16), inside[:, None])
    # The slots of the loop above are left out: no byte is written by two threads, which come in any order.
    slots = tl.arange(0, 1 + ESCAPES)[None, :]
    rest = tl.where(slots == 0, base[:, None], 0).to(tl.uint8)
    target = heads + group[:, None] * (1 + ESCAPES) + slots
    tl.store(target, rest, inside[:, None] & ((slots == 0) | (slots > needed)))


@jit
def unpack_pass(
    words: tensor, marks: tensor, codes: tensor, heads: tensor, groups: tensor,
    HALF: constexpr, ROWS: constexpr, ESCAPES: constexpr, OF_ZERO: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """pattern = sign << 15 | exponent << 7 | mantissa, with the exponent that its code tells; two in a word."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = group < groups
    lane = tl.arange(0, HALF)[None, :]
    place = group[:, None] * (2 * HALF) + lane
    code = tl.load(codes + group[:, None] * HALF + lane, inside[:, None], 0).to(tl.int32)
    mark = tl.load(marks + place, inside[:, None], 0).to(tl.int32)
    other_mark = tl.load(marks + place + HALF, inside[:, None], 0).to(tl.int32)
    head = heads + group * (1 + ESCAPES)
    base = tl.load(head, inside, 0).to(tl.int32)[:, None] * 0x00010001

    code = (code & 0xFF) | ((code & 0xFF00) << 8)
    code, other = code & 0x000F000F, (code >> 4) & 0x000F000F
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
    tl.store(words + place, (first << 7) | spread(mark), inside[:, None])
    tl.store(words + place + HALF, (second << 7) | spread(other_mark), inside[:, None])


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
