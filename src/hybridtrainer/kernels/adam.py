"""The optimizer update of one tensor: Triton on a GPU, the reference elsewhere.

On a GPU nothing here waits for the device, and no temporary is as large as the tensor. Triton is imported by the
first update that needs it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from hybridtrainer.errors import ModelError
from hybridtrainer.kernels import reference
from hybridtrainer.kernels.formats import CODES, Format
from hybridtrainer.kernels.reference import FOR_MOMENTS, FOR_WEIGHT, Hyper, State
from hybridtrainer.kernels.rounding import SMALLEST_SCALE

# Elements of one program: enough for wide loads in each of its 128 threads, few enough to leave them registers.
TILE_ELEMENTS = 1024
# A program of the factored passes has a tile of a matrix: enough for its few loads of row and column factors to be
# nothing beside those of the gradient.
MATRIX_TILE_ELEMENTS = 4096
MATRIX_TILE_WIDTH = 512
MATRIX_WARPS = 8
# A program that sums squares goes down a strip of this many rows and columns: the partial sums are then a sixtieth of
# a bf16 gradient. A tile of the strip is what its 256 threads read in four loads of 16 bytes each.
STRIP_SIDE = 256
STRIP_TILE_ELEMENTS = 8192
STRIP_WARPS = 8
# torch's own AdamW needs copies of what it changes; in pieces they stay small beside the tensor.
FP32_PIECE_ELEMENTS = 1 << 22


@torch.no_grad()
def update_(
    kind: Format,
    weight: Tensor,
    state: State,
    gradient: Tensor,
    hyper: Hyper,
    scale: Tensor,
    ok: Tensor,
    use_triton: bool | None = None,
) -> None:
    """One optimizer step in place, as `reference.update_` defines it.

    Args:
        kind: How weight and state are kept.
        weight: Flat, of `weight_dtype(kind)`.
        state: The tensors of `state_fields(kind, shape)`.
        gradient: As many elements as the weight, contiguous, in bf16 or fp32.
        hyper: Learning rate and the like.
        scale: 0-dim fp32 on the weight's device, multiplied onto the gradient.
        ok: 0-dim int32 on the weight's device; where it is 0 nothing at all is changed.
        use_triton: Whether kernels run; by default for CUDA tensors. On a CPU they need Triton's interpreter.

    Raises:
        ModelError: where kernels must run and Triton is not installed.

    >>> weight, state = torch.zeros(1), {"m": torch.zeros(1), "v": torch.zeros(1)}
    >>> hyper = Hyper(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1, seed=0, tensor=0)
    >>> update_("fp32", weight, state, torch.ones(1), hyper, torch.tensor(1.0), torch.tensor(1, dtype=torch.int32))
    >>> weight
    tensor([-0.1000])
    """
    on_device = weight.is_cuda if use_triton is None else use_triton
    if not on_device:
        reference.update_(kind, weight, state, gradient, hyper, scale, ok)
    elif kind == "fp32":
        _update_fp32_(weight, state, gradient.reshape(-1), hyper, scale, ok)
    elif len(weight) == 0:
        pass
    elif kind == "factored":
        _launch_factored_(weight, state, gradient.reshape(-1), hyper, scale, ok)
    else:
        _launch_adam_(kind, weight, state, gradient.reshape(-1), hyper, scale, ok)


def _launch_adam_(
    kind: Format, weight: Tensor, state: State, gradient: Tensor, hyper: Hyper, scale: Tensor, ok: Tensor
) -> None:
    passes = _passes()
    codes = CODES.get(kind)
    block = codes.block if codes else 256
    blocks = TILE_ELEMENTS // block
    grid = (-(-len(weight) // TILE_ELEMENTS),)
    passes.adam_pass[grid](
        weight, state.get("low"), state["m"], state["v"], state.get("m_scale"), state.get("v_scale"),
        gradient, scale, ok, len(weight), len(state["m"]), hyper.first_element,
        1 - hyper.beta1, 1 - hyper.beta2, hyper.decay, hyper.step_size, hyper.second_bias**-0.5, hyper.eps,
        *_signed_halves(hyper.key(FOR_WEIGHT)), *_signed_halves(hyper.key(FOR_MOMENTS)),
        LOW="low" in state, BITS=codes.bits if codes else 32,
        TOP1=codes.first_top if codes else 0, TOP2=codes.second_top if codes else 0,
        SMALLEST=SMALLEST_SCALE, BLOCK=block, BLOCKS=blocks,
    )  # fmt: skip


def _launch_factored_(weight: Tensor, state: State, gradient: Tensor, hyper: Hyper, scale: Tensor, ok: Tensor) -> None:
    passes = _passes()
    height, width = len(state["rows"]), len(state["columns"])
    row_norms, column_norms = _norms(gradient, height, width)
    rows, columns = reference.factors_(state, row_norms, column_norms, hyper, scale, ok)
    tile_width = min(MATRIX_TILE_WIDTH, _power_of_two(width))
    tile_height = min(MATRIX_TILE_ELEMENTS // tile_width, _power_of_two(height))
    programs = -(-height // tile_height) * -(-width // tile_width)
    sums = torch.empty(programs, dtype=torch.float32, device=weight.device)
    tile = {"ROWS": tile_height, "COLUMNS": tile_width, "num_warps": MATRIX_WARPS}
    passes.factored_square_pass[(programs,)](gradient, scale, rows, columns, sums, height, width, hyper.eps, **tile)
    rate = hyper.lr / (sums.sum() / len(weight)).sqrt().clamp(min=1)
    passes.factored_pass[(programs,)](
        weight, gradient, scale, rows, columns, rate, ok, height, width, hyper.decay, hyper.eps,
        *_signed_halves(hyper.key(FOR_WEIGHT)), **tile,
    )  # fmt: skip


def _norms(gradient: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """As `reference.norms`, with the gradient read once."""
    tile_width = min(STRIP_SIDE, _power_of_two(width))
    tile_height = min(STRIP_TILE_ELEMENTS // tile_width, _power_of_two(height))
    tiles = min(max(1, STRIP_SIDE // tile_height), -(-height // tile_height))
    down, across = -(-height // (tiles * tile_height)), -(-width // tile_width)
    row_sums = torch.empty(across, height, dtype=torch.float32, device=gradient.device)
    column_sums = torch.empty(down, width, dtype=torch.float32, device=gradient.device)
    _passes().square_sums_pass[(down * across,)](
        gradient, row_sums, column_sums, height, width, tiles,
        ROWS=tile_height, COLUMNS=tile_width, num_warps=STRIP_WARPS,
    )  # fmt: skip
    return row_sums.sum(dim=0).sqrt_(), column_sums.sum(dim=0).sqrt_()


def _power_of_two(length: int) -> int:
    """The smallest that is not below a length."""
    return 1 << (length - 1).bit_length()


def _update_fp32_(weight: Tensor, state: State, gradient: Tensor, hyper: Hyper, scale: Tensor, ok: Tensor) -> None:
    kept = {"weight": weight, **state}
    for start in range(0, len(weight), FP32_PIECE_ELEMENTS):
        piece = slice(start, start + FP32_PIECE_ELEMENTS)
        fresh = {name: tensor[piece].clone() for name, tensor in kept.items()}
        reference.adamw_(fresh["weight"], fresh, gradient[piece].float() * scale, hyper)
        for name, tensor in kept.items():
            tensor[piece] = torch.where(ok != 0, fresh[name], tensor[piece])


def _signed_halves(key: int) -> tuple[int, int]:
    # As int32 whatever their value: Triton compiles a kernel anew for an argument of another type.
    low, high = key & 0xFFFFFFFF, key >> 32
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


def _passes() -> Any:
    if importlib.util.find_spec("triton") is None:
        raise ModelError(
            "The optimizer's GPU kernels need Triton, which is not installed.",
            'Install it: pip install ".[kernels]".',
        )
    from hybridtrainer.kernels import passes

    return passes
