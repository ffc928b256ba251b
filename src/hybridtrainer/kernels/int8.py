"""Signed whole numbers of 8 bits with one scale for each block of neighbours: value = code x scale.

The codes are even, for values of which only the size in their block counts: weights and displacements. Moments have
codes of their own in `rounding.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # elements that share one scale

Quantized = tuple[Tensor, Tensor]
"""8-bit codes, and the scale of each block."""


def quantize(values: Tensor, block: int = BLOCK) -> Quantized:
    """8-bit codes of flat values, padded to whole blocks, and one scale for each block.

    The largest of a block is coded exactly; the error of the others is at most half a scale.

    >>> quantize(torch.tensor([127.0, -2.0]), block=2)
    (tensor([127,  -2], dtype=torch.int8), tensor([1.]))
    """
    if len(values) % block:
        values = torch.nn.functional.pad(values, (0, -len(values) % block))
    blocks = values.view(-1, block)
    low, high = blocks.aminmax(dim=1)
    scales = torch.maximum(-low, high) / 127
    inverse = torch.where(scales >= torch.finfo(scales.dtype).tiny, 1 / scales, 0)
    codes = (blocks * inverse[:, None]).round_()
    return codes.to(torch.int8).view(-1), scales


def dequantize(codes: Tensor, scales: Tensor, factor: float = 1.0) -> Tensor:
    """The values that codes and scales stand for, times `factor`, padded to whole blocks."""
    block = codes.numel() // scales.numel()
    return (codes.view(-1, block).to(scales.dtype) * (scales * factor)[:, None]).view(-1)
