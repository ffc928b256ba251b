"""Weight matrices in 8 bits, for good where they are frozen, and for a while in forward passes that only measure.

A layer reads its matrix as before and gets a fresh one in its own type, so that there is never more than one of them
beside the codes. What is trained is never rounded: the full weights wait elsewhere and come back bit for bit.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from hybridtrainer.kernels.formats import FULL_PRECISION_BELOW
from hybridtrainer.kernels.int8 import BLOCK, quantize
from hybridtrainer.memory.coded_linear import CodedLinear
from hybridtrainer.memory.parking import Parking
from hybridtrainer.weights import HostCopy

PIECE_ELEMENTS = 1 << 22  # quantized at a time, so that temporaries stay small beside the matrix
SHORTEST_BLOCK = 32  # a scale for fewer elements would cost more than the codes save
_HELD = "_int8_matrices"


@dataclass(frozen=True)
class Int8Matrix:
    """A matrix as codes, with a scale for each block of a row.

    Attributes:
        codes: int8, in the matrix's shape.
        scales: fp32, (rows, blocks in a row).
        dtype: The type that the matrix is read in.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, matrix: Tensor) -> Int8Matrix:
        """The nearest codes of a matrix."""
        rows, width = matrix.shape
        block = _block_of(width)
        codes = torch.empty(rows, width, dtype=torch.int8, device=matrix.device)
        scales = torch.empty(rows, width // block, device=matrix.device)
        step = max(1, PIECE_ELEMENTS // width)
        for start in range(0, rows, step):
            piece, piece_scales = quantize(matrix[start : start + step].float().reshape(-1), block)
            codes[start : start + step] = piece.view(-1, width)
            scales[start : start + step] = piece_scales.view(-1, width // block)
        return cls(codes, scales, matrix.dtype)

    @torch.no_grad()
    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix that the codes stand for."""
        values = torch.empty(self.codes.shape, dtype=dtype or self.dtype, device=self.codes.device)
        blocks = self.scales.shape[1]
        shape = (*self.scales.shape, self.codes.shape[1] // blocks)
        torch.mul(self.codes.view(shape), self.scales[:, :, None], out=values.view(shape))
        return values

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


@contextmanager
def int8_matrices(model: nn.Module, home: HostCopy, parking: Parking) -> Iterator[int]:
    """While open, the model computes with 8-bit copies of its matrices; afterwards every bit is as before.

    Not only the matrices of linear layers: every parameter of two dimensions, embeddings too. No gradient can be
    taken meanwhile. On a GPU the full matrices wait in host memory; on a CPU they are there already and stay.

    Args:
        model: Read through its modules' attributes; who holds on to a weight itself sees what `parking` leaves there.
        home: Host memory for the full matrices, kept from one time to the next.
        parking: Takes them off the device.

    Yields:
        Bytes of all codes and scales.
    """
    places = _matrices(model)
    leaving: dict[str, Tensor] = {str(number): matrix for number, matrix in enumerate(places) if parking.leaves(matrix)}
    home.take(leaving)
    copies = {id(matrix): home[number] for number, matrix in leaving.items()}
    held = []
    total = 0
    try:
        for matrix, owners in places.items():
            codes = Int8Matrix.of(matrix.detach())
            total += codes.nbytes
            if id(matrix) in copies:
                parking.park([(matrix, copies[id(matrix)])])
            for module, name in owners:
                held.append(module)
                _read_from(module, name, codes)
        yield total
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold the activations for whose memory the matrices wait
        raise
    finally:
        for module in held:
            _read_own(module)
        parking.bring_back()


class Int8Linear(CodedLinear):
    """A linear layer with a frozen weight in 8 bits."""

    kind = Int8Matrix


def _block_of(width: int) -> int:
    """The longest block, not beyond `BLOCK`, of which a row is a whole number; the row itself where all are short."""
    return next((block for block in range(BLOCK, SHORTEST_BLOCK - 1, -1) if width % block == 0), width)


def _matrices(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The matrices that are worth it, each with the modules that read it."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        # Some hold on to the tensors themselves; a layer in few bits needs its scales as they are.
        if isinstance(module, nn.RNNBase | torch.jit.ScriptModule | CodedLinear):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and _is_worth_it(parameter):
                found.setdefault(parameter, []).append((module, name))
    return found


def _is_worth_it(parameter: nn.Parameter) -> bool:
    is_known = parameter.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_known and parameter.dim() == 2 and parameter.numel() >= FULL_PRECISION_BELOW


def _read_from(module: nn.Module, name: str, matrix: Int8Matrix) -> None:
    held = module.__dict__.setdefault(_HELD, {})
    held[name] = matrix
    base = type(module) if len(held) == 1 else type(module).__bases__[0]
    module.__class__ = _reading(base, tuple(sorted(held)))


def _read_own(module: nn.Module) -> None:
    if module.__dict__.pop(_HELD, None) is not None:
        module.__class__ = type(module).__bases__[0]


@cache
def _reading(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A class that differs from its base in where it reads some parameters from."""

    def reader(name: str) -> property:
        return property(lambda module: module.__dict__[_HELD][name].read())

    return type(base.__name__, (base,), {name: reader(name) for name in names} | {"__module__": base.__module__})
