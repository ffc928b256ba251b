"""bf16 in 12.1 bits without loss: the exponents of neighbours are nearly equal, and 4 bits tell them apart.

Of each group of 1024 patterns a head of 16 bytes has the largest exponent and a list of at most 15 exponents. A pattern
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
ESCAPES = 15  # exponents that a head lists
HEAD_BYTES = 1 + ESCAPES
OF_ZERO, ESCAPED = 14, 15  # codes
ROWS = 4  # groups of one program
WARPS = 4  # as many as groups: the largest exponent and the ranks of a group are found within a warp
Planes = tuple[Tensor, Tensor, Tensor, Tensor]
# The reference goes through a run in pieces, so that its temporaries stay small.
PIECE_GROUPS = 4096


def packed_bytes(elements: int) -> int:
    """What so many patterns take when packed: 1552 bytes for 1024.

    >>> packed_bytes(1024)
    1552
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
        most: One int32, raised to the most escapes that any group needs. The packing is exact where it is at most
            ESCAPES.
        use_triton: Whether the kernel runs; by default for CUDA tensors. On a CPU it needs Triton's interpreter.

    Raises:
        ValueError: where a tensor has another size or type.

    >>> weights = torch.linspace(-1, 1, 1024).bfloat16()
    >>> packed, most = torch.empty(packed_bytes(1024), dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    >>> pack_(weights.view(torch.uint8), packed, most)
    >>> back = torch.empty_like(weights)
    >>> unpack_(packed, back.view(torch.uint8))
    >>> torch.equal(back, weights), most.item()
    (True, 0)
    """
    if most.dtype != torch.int32 or most.numel() != 1:
        raise ValueError(f"`most` has {most.numel()} elements of {most.dtype}. Pass a tensor of one int32.")
    patterns, marks, codes, heads = _planes(raw, packed)
    groups = len(heads) // HEAD_BYTES
    if not ((raw.is_cuda and tl is not None) if use_triton is None else use_triton):
        for piece in _pieces(patterns, marks, codes, heads):
            _pack_piece_(*piece, most)
    elif groups:
        pack_pass[(-(-groups // ROWS),)](
            patterns, marks, codes, heads, most, groups,
            HALF=GROUP // 2, ROWS=ROWS, ESCAPES=ESCAPES, OF_ZERO=OF_ZERO, ESCAPED=ESCAPED, num_warps=WARPS,
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
            patterns, marks, codes, heads, groups,
            HALF=GROUP // 2, ROWS=ROWS, ESCAPES=ESCAPES, OF_ZERO=OF_ZERO, ESCAPED=ESCAPED, num_warps=WARPS,
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
    most.copy_(torch.maximum(most, rank[:, -1].amax()))
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
    patterns: tensor, marks: tensor, codes: tensor, heads: tensor, most: tensor, groups: tensor,
    HALF: constexpr, ROWS: constexpr, ESCAPES: constexpr, OF_ZERO: constexpr, ESCAPED: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """mark = sign << 7 | mantissa; code = base - exponent, OF_ZERO or ESCAPED; head = base, escapes in order, zeros.

    Both halves of ROWS groups, a group to a row. Ranks are computed where a program has an escape at all.
    """
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = group < groups
    lane = tl.arange(0, HALF)[None, :]
    place = group[:, None] * (2 * HALF) + lane
    first = tl.load(patterns + place, inside[:, None], 0).to(tl.int32)
    second = tl.load(patterns + place + HALF, inside[:, None], 0).to(tl.int32)
    tl.store(marks + place, ((first >> 8 & 0x80) | (first & 0x7F)).to(tl.uint8), inside[:, None])
    tl.store(marks + place + HALF, ((second >> 8 & 0x80) | (second & 0x7F)).to(tl.uint8), inside[:, None])

    first, second = first >> 7 & 0xFF, second >> 7 & 0xFF
    base = tl.max(tl.maximum(first, second), axis=1)
    code, other = base[:, None] - first, base[:, None] - second
    code = tl.where(first == 0, OF_ZERO, tl.where(code < OF_ZERO, code, ESCAPED))
    other = tl.where(second == 0, OF_ZERO, tl.where(other < OF_ZERO, other, ESCAPED))
    # Escapes of the first half are counted in the low 16 bits, those of the second in the high ones.
    escaped = (code == ESCAPED).to(tl.int32) | ((other == ESCAPED).to(tl.int32) << 16)
    counted = tl.sum(escaped, axis=1)
    count = (counted & 0xFFFF) + (counted >> 16)
    needed = tl.max(count, axis=0)
    head = heads + group * (1 + ESCAPES)
    if needed > 0:
        of_first, of_second = ranks(code == ESCAPED, other == ESCAPED, escaped, counted)
        for slot in range(1, tl.minimum(needed, ESCAPES) + 1):
            of_slot = tl.where(of_first == slot, first, 0) + tl.where(of_second == slot, second, 0)
            tl.store(head + slot, tl.sum(of_slot, axis=1).to(tl.uint8), inside)
        code = tl.where(of_first > ESCAPES, OF_ZERO, code)
        other = tl.where(of_second > ESCAPES, OF_ZERO, other)
        if needed > tl.load(most):  # seldom, so that programs do not queue at one address; an old value does no harm
            tl.atomic_max(most, needed, sem="relaxed")
    tl.store(codes + group[:, None] * HALF + lane, (code | other << 4).to(tl.uint8), inside[:, None])
    # The slots of the loop above are left out: no byte is written by two threads, which come in any order.
    slots = tl.arange(0, 1 + ESCAPES)[None, :]
    rest = tl.where(slots == 0, base[:, None], 0).to(tl.uint8)
    tl.store(head[:, None] + slots, rest, inside[:, None] & ((slots == 0) | (slots > needed)))


@jit
def ranks(first: tensor, second: tensor, both: tensor, counted: tensor) -> tensor:
    """Of the escapes in both halves of each row, from 1, which is their slot in the head; 0 of what is none.

    `both` has those of the first half as 1 and of the second as 1 << 16, `counted` its sums.
    """
    rank = tl.cumsum(both, axis=1)
    of_second = (rank >> 16) + (counted & 0xFFFF)[:, None]
    return tl.where(first, rank & 0xFFFF, 0), tl.where(second, of_second, 0)


@jit
def unpack_pass(
    patterns: tensor, marks: tensor, codes: tensor, heads: tensor, groups: tensor,
    HALF: constexpr, ROWS: constexpr, ESCAPES: constexpr, OF_ZERO: constexpr, ESCAPED: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """pattern = sign << 15 | exponent << 7 | mantissa, with the exponent that its code tells."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = group < groups
    lane = tl.arange(0, HALF)[None, :]
    place = group[:, None] * (2 * HALF) + lane
    both = tl.load(codes + group[:, None] * HALF + lane, inside[:, None], 0).to(tl.int32)
    mark, other_mark = tl.load(marks + place, inside[:, None], 0), tl.load(marks + place + HALF, inside[:, None], 0)
    code, other = both & 15, both >> 4
    head = heads + group * (1 + ESCAPES)
    base = tl.load(head, inside, 0).to(tl.int32)[:, None]
    first = tl.where(code < OF_ZERO, base - code, 0)
    second = tl.where(other < OF_ZERO, base - other, 0)
    escaped = (code == ESCAPED).to(tl.int32) | ((other == ESCAPED).to(tl.int32) << 16)
    counted = tl.sum(escaped, axis=1)
    most = tl.max((counted & 0xFFFF) + (counted >> 16), axis=0)
    if most > 0:
        of_first, of_second = ranks(code == ESCAPED, other == ESCAPED, escaped, counted)
        for slot in range(1, tl.minimum(most, ESCAPES) + 1):
            listed = tl.load(head + slot, inside, 0).to(tl.int32)[:, None]
            first = tl.where(of_first == slot, listed, first)
            second = tl.where(of_second == slot, listed, second)
    mark, other_mark = mark.to(tl.int32), other_mark.to(tl.int32)
    pattern = (mark & 0x80) << 8 | first << 7 | (mark & 0x7F)
    other_pattern = (other_mark & 0x80) << 8 | second << 7 | (other_mark & 0x7F)
    tl.store(patterns + place, pattern.to(tl.int16), inside[:, None])
    tl.store(patterns + place + HALF, other_pattern.to(tl.int16), inside[:, None])
