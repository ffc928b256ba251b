"""bf16 in 12.5 bits without loss: the exponents of neighbours are nearly equal, and 4 bits tell them apart.

Of each group of 1024 patterns a head of 64 bytes has the largest exponent and a list of at most 63 exponents. A pattern
keeps its sign and mantissa in a byte, and a code: 0 to 13 are so many below the largest exponent; 14 is the exponent 0,
of zeros and subnormals; 15, an escape, is the next of the list. Signs with mantissas, codes and heads are a plane each,
one after the other. Patterns i and i + 512 of a group share a byte of codes, the first in the low half.

A group that needs more escapes than its list holds is whole: instead of codes it has its first 512 exponents, instead
of a head the next 64, and the other 448 lie elsewhere, where the caller has room for them. A byte for each group says
whether it is whole, so that any 16 bits come back as they were, those of NaNs included.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridtrainer.kernels.packed_passes import HAS_TRITON, count_pass, pack_pass, unpack_pass

GROUP = 1024  # patterns that share a head
ESCAPES = 63  # exponents that a head lists
HEAD_BYTES = 1 + ESCAPES
OF_ZERO, ESCAPED = 14, 15  # codes
REST_BYTES = GROUP // 2 - HEAD_BYTES  # exponents of a whole group that lie elsewhere
ROWS, WARPS = 1, 1  # groups of one program, and its warps
Planes = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
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


def pack_(
    raw: Tensor, packed: Tensor, rest: Tensor, whole: Tensor, most: Tensor, use_triton: bool | None = None
) -> None:
    """Packs a run of 16-bit patterns. On a GPU nothing waits for the device.

    Args:
        raw: Flat uint8, two bytes for each pattern, a multiple of GROUP patterns.
        packed: Flat uint8 of at least `packed_bytes(patterns)`; what is beyond them is left alone.
        rest: Flat uint8, REST_BYTES for each group, written where a group is whole and left alone where it is not. With
            tensors on a GPU it may be host memory that CUDA knows.
        whole: Flat uint8, a byte for each group, set to whether it is whole.
        most: One int32, raised to the most escapes that any group needs.
        use_triton: Whether the kernel runs; by default for CUDA tensors. On a CPU it needs Triton's interpreter.

    Raises:
        ValueError: where a tensor has another size or type.

    >>> weights = torch.linspace(-1, 1, 1024).bfloat16()
    >>> packed, rest, whole = (torch.empty(size, dtype=torch.uint8) for size in (packed_bytes(1024), REST_BYTES, 1))
    >>> most = torch.zeros(1, dtype=torch.int32)
    >>> pack_(weights.view(torch.uint8), packed, rest, whole, most)
    >>> back = torch.empty_like(weights)
    >>> unpack_(packed, rest, whole, back.view(torch.uint8))
    >>> torch.equal(back, weights), bool(whole), int(most)
    (True, False, 0)
    """
    _require_one(most)
    planes = _planes(raw, packed, rest, whole)
    if not _by_triton(raw, use_triton):
        for piece in _pieces(planes):
            _pack_piece_(*piece, most)
    elif len(whole):
        patterns, marks, codes, heads, rest, whole = planes
        pack_pass[(-(-len(whole) // ROWS),)](
            patterns.view(torch.int32), marks.view(torch.int16), codes.view(torch.int16), heads, rest.view(torch.int16),
            whole, most, len(whole), HALF=GROUP // 4, ROWS=ROWS, ESCAPES=ESCAPES, OF_ZERO=OF_ZERO, num_warps=WARPS,
        )  # fmt: skip


def unpack_(packed: Tensor, rest: Tensor, whole: Tensor, raw: Tensor, use_triton: bool | None = None) -> None:
    """Writes the patterns that `pack_` was given.

    Args:
        packed: Flat uint8 of at least `packed_bytes(patterns)`.
        rest: As `pack_` has left it.
        whole: The same.
        raw: Flat uint8, two bytes for each pattern: as many as were packed.
        use_triton: Whether the kernel runs; by default for CUDA tensors. On a CPU it needs Triton's interpreter.

    Raises:
        ValueError: where a tensor has another size or type.
    """
    planes = _planes(raw, packed, rest, whole)
    if not _by_triton(raw, use_triton):
        for piece in _pieces(planes):
            _unpack_piece_(*piece)
    elif len(whole):
        patterns, marks, codes, heads, rest, whole = planes
        unpack_pass[(-(-len(whole) // ROWS),)](
            patterns.view(torch.int32), marks.view(torch.int16), codes.view(torch.int16), heads, rest.view(torch.int16),
            whole, len(whole), HALF=GROUP // 4, ROWS=ROWS, ESCAPES=ESCAPES, OF_ZERO=OF_ZERO, num_warps=WARPS,
        )  # fmt: skip


def count_escapes_(raw: Tensor, most: Tensor, use_triton: bool | None = None) -> None:
    """Raises `most` to the most escapes that any group of a run would need.

    Args:
        raw: Flat uint8, two bytes for each pattern, a multiple of GROUP patterns.
        most: One int32.
        use_triton: Whether the kernel runs; by default for CUDA tensors. On a CPU it needs Triton's interpreter.

    Raises:
        ValueError: where a tensor has another size or type.
    """
    _require_one(most)
    _require_flat(raw=raw)
    packed_bytes(len(raw) // 2)
    groups = len(raw) // (2 * GROUP)
    if not _by_triton(raw, use_triton):
        patterns = raw.view(torch.int16).view(-1, GROUP)
        for start in range(0, groups, PIECE_GROUPS):
            _raise(most, _escaped(_exponents(patterns[start : start + PIECE_GROUPS])).sum(1))
    elif groups:
        count_pass[(-(-groups // ROWS),)](
            raw.view(torch.int32), most, groups, HALF=GROUP // 4, ROWS=ROWS, OF_ZERO=OF_ZERO, num_warps=WARPS
        )


def _by_triton(tensor: Tensor, use_triton: bool | None) -> bool:
    return (tensor.is_cuda and HAS_TRITON) if use_triton is None else use_triton


def _require_one(most: Tensor) -> None:
    if most.dtype != torch.int32 or most.shape != (1,):
        raise ValueError(f"`most` is {tuple(most.shape)} of {most.dtype}. Pass a tensor of one int32.")


def _require_flat(**tensors: Tensor) -> None:
    for name, flat in tensors.items():
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(
                f"`{name}` is {tuple(flat.shape)} of {flat.dtype}. Pass a flat contiguous tensor of uint8: "
                "tensor.view(-1).view(torch.uint8)."
            )
    if tensors["raw"].numel() % 2:
        raise ValueError(f"`raw` has {tensors['raw'].numel()} bytes. Pass two for each pattern.")


def _planes(raw: Tensor, packed: Tensor, rest: Tensor, whole: Tensor) -> Planes:
    """The patterns as int16; signs with mantissas, codes, heads, rests and whether groups are whole as bytes."""
    _require_flat(raw=raw, packed=packed, rest=rest, whole=whole)
    elements = raw.numel() // 2
    needed = packed_bytes(elements)
    if packed.numel() < needed:
        raise ValueError(f"`packed` has {packed.numel()} bytes. {elements} elements need {needed}.")
    groups = len(raw) // (2 * GROUP)
    for name, flat, size in (("rest", rest, groups * REST_BYTES), ("whole", whole, groups)):
        if len(flat) != size:
            raise ValueError(f"`{name}` has {len(flat)} bytes. {groups} groups need {size}.")
    codes_end = elements + elements // 2
    marks, codes, heads = packed[:elements], packed[elements:codes_end], packed[codes_end:needed]
    return raw.view(torch.int16), marks, codes, heads, rest, whole


def _pieces(planes: Planes) -> Iterator[Planes]:
    """All of them in parts of PIECE_GROUPS groups, a row for each group."""
    groups = len(planes[-1])
    rows = [plane.view(groups, -1) if groups else plane.view(0, 1) for plane in planes]
    for start in range(0, groups, PIECE_GROUPS):
        patterns, marks, codes, heads, rest, whole = (plane[start : start + PIECE_GROUPS] for plane in rows)
        yield patterns, marks, codes, heads, rest, whole


def _exponents(patterns: Tensor) -> Tensor:
    return patterns.to(torch.int32) >> 7 & 0xFF


def _escaped(exponent: Tensor) -> Tensor:
    """Which patterns need an escape; a row is a group."""
    return (exponent != 0) & (exponent.amax(1, keepdim=True) - exponent >= OF_ZERO)


def _raise(most: Tensor, needed: Tensor) -> None:
    most.copy_(torch.maximum(most, needed.amax()))


def _pack_piece_(
    patterns: Tensor, marks: Tensor, codes: Tensor, heads: Tensor, rest: Tensor, whole: Tensor, most: Tensor
) -> None:
    bits = patterns.to(torch.int32)
    marks.copy_((bits >> 8 & 0x80) | (bits & 0x7F))
    exponent = _exponents(patterns)
    base = exponent.amax(1, keepdim=True)
    escaped = _escaped(exponent)
    rank = escaped.cumsum(1)  # from 1, which is the place in the head: the base is at 0
    _raise(most, rank[:, -1])
    is_whole = rank[:, -1:] > ESCAPES
    code = torch.where(escaped, ESCAPED, torch.where(exponent == 0, OF_ZERO, base - exponent))
    first, second = code.chunk(2, dim=1)
    wide = torch.zeros(len(heads), HEAD_BYTES + 1, dtype=torch.int32, device=heads.device)  # the last is for nothing
    wide.scatter_(1, torch.where(escaped & ~is_whole, rank, HEAD_BYTES), exponent)
    wide[:, :1] = base
    in_codes, in_head, in_rest = torch.split(exponent, [GROUP // 2, HEAD_BYTES, REST_BYTES], 1)
    codes.copy_(torch.where(is_whole, in_codes, first | second << 4))
    heads.copy_(torch.where(is_whole, in_head, wide[:, :HEAD_BYTES]))
    rest.copy_(torch.where(is_whole, in_rest, rest))
    whole.copy_(is_whole)


def _unpack_piece_(patterns: Tensor, marks: Tensor, codes: Tensor, heads: Tensor, rest: Tensor, whole: Tensor) -> None:
    code = torch.cat([codes & 15, codes >> 4], 1).to(torch.int32)
    wide = heads.to(torch.int32)
    escaped = code == ESCAPED
    listed = wide.gather(1, torch.where(escaped, escaped.cumsum(1).clamp(max=ESCAPES), 0))
    exponent = torch.where(escaped, listed, torch.where(code == OF_ZERO, 0, wide[:, :1] - code))
    exponent = torch.where(whole != 0, torch.cat([codes, heads, rest], 1).to(torch.int32), exponent)
    mark = marks.to(torch.int32)
    patterns.copy_((mark & 0x80) << 8 | exponent << 7 | (mark & 0x7F))
