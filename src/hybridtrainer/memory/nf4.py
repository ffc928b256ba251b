"""Frozen weight matrices in 4 bits: codes of a table whose values lie as those of a normal distribution do.

Each run of 64 neighbours in a row shares a scale, the largest of them, so that a weight takes 4.5 bits. A layer makes
its matrix anew in its own type for each pass, so that there is never more than one of them beside the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hybridtrainer.memory.coded_linear import CodedLinear

BLOCK = 64
ROWS_AT_ONCE = 1 << 20  # elements coded at a time, so that temporaries stay small beside the matrix
# The outermost quantile, half-way between those of 15 and 16 even steps (Dettmers et al., 2023, arXiv:2305.14314).
OUTERMOST = 1 - (1 / 32 + 1 / 30) / 2


@cache
def table() -> Tensor:
    """The 16 values from -1 to 1, zero among them: seven quantiles of the normal below it and eight above.

    >>> [round(value, 3) for value in table().tolist()][6:10]
    [-0.091, 0.0, 0.08, 0.161]
    """
    above = torch.special.ndtri(torch.linspace(0.5, OUTERMOST, 9, dtype=torch.float64)[1:])
    below = -torch.special.ndtri(torch.linspace(0.5, OUTERMOST, 8, dtype=torch.float64)[1:])
    values = torch.cat([below.flip(0), torch.zeros(1, dtype=torch.float64), above])
    return (values / values[-1]).float()


@dataclass(frozen=True)
class Nf4Matrix:
    """A matrix as codes, two to a byte, with a scale for each block of a row.

    Attributes:
        codes: uint8, (rows, half the width); the first of two codes is in the low half.
        scales: fp32, (rows, blocks in a row).
        dtype: The type that the matrix is read in.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, matrix: Tensor) -> Nf4Matrix:
        """The nearest codes of a matrix whose rows are a whole number of blocks."""
        rows, width = matrix.shape
        values = table().to(matrix.device)
        middles = (values[1:] + values[:-1]) / 2
        codes = torch.empty(rows, width // 2, dtype=torch.uint8, device=matrix.device)
        scales = torch.empty(rows, width // BLOCK, device=matrix.device)
        step = max(1, ROWS_AT_ONCE // width)
        for start in range(0, rows, step):
            blocks = matrix[start : start + step].float().reshape(-1, width // BLOCK, BLOCK)
            largest = blocks.abs().amax(dim=2)
            inverse = torch.where(largest > 0, 1 / largest, 0)
            near = torch.bucketize(blocks * inverse[:, :, None], middles).to(torch.uint8).view(-1, width // 2, 2)
            codes[start : start + step] = near[:, :, 0] | (near[:, :, 1] << 4)
            scales[start : start + step] = largest
        return cls(codes, scales, matrix.dtype)

    @torch.no_grad()
    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix that the codes stand for."""
        kept = dtype or self.dtype
        pairs = torch.stack([self.codes & 15, self.codes >> 4], dim=-1)
        values = table().to(self.codes.device, kept)[pairs.int()]
        rows, blocks = self.scales.shape
        return (values.view(rows, blocks, BLOCK) * self.scales.to(kept)[:, :, None]).view(rows, blocks * BLOCK)

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


class Nf4Linear(CodedLinear):
    """A linear layer with a frozen weight in 4 bits; its rows must be a whole number of blocks."""

    kind = Nf4Matrix
