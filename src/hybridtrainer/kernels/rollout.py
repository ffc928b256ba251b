"""Going on without features: H ticks of a recurrent state-space model for all members, in one launch on a GPU.

From tick to tick, with z the probabilities of the categoricals' classes (their expectation, so that nothing is drawn):

    r, u = sigmoid(x_r + k_r), sigmoid(x_u + k_u)     with x = z W_input + b_input, k = h W_hidden + b_hidden
    n = tanh(x_n + r k_n)
    h' = (1 - u) n + u h
    z' = 0.99 softmax(h' W_prior + b_prior) + 0.01 / classes, for each categorical
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtrainer.kernels.quant import jit

try:
    import triton.language as tl
    from triton.language import constexpr, tensor
except ImportError:
    tl = constexpr = tensor = None

UNIFORM = 0.01  # share of each categorical that stays even, so that no class is ever impossible
TILE = 16  # inputs whose weights are read at once
WARPS = 8


class Cell(NamedTuple):
    """The weights of a tick, each with the members first.

    Attributes:
        input: (members, z, 3 d), for the gates r, u, n.
        input_bias: (members, 1, 3 d).
        hidden: (members, d, 3 d).
        hidden_bias: (members, 1, 3 d).
        prior: (members, d, z).
        prior_bias: (members, 1, z).
    """

    input: Tensor
    input_bias: Tensor
    hidden: Tensor
    hidden_bias: Tensor
    prior: Tensor
    prior_bias: Tensor


def gru(cell: Cell, z: Tensor, h: Tensor) -> Tensor:
    """The next h: (members, n, z) and (members, n, d) to (members, n, d)."""
    x_r, x_u, x_n = torch.baddbmm(cell.input_bias, z, cell.input).chunk(3, -1)
    k_r, k_u, k_n = torch.baddbmm(cell.hidden_bias, h, cell.hidden).chunk(3, -1)
    update = torch.sigmoid(x_u + k_u)
    return (1 - update) * torch.tanh(x_n + torch.sigmoid(x_r + k_r) * k_n) + update * h


def probabilities(logits: Tensor, classes: int) -> Tensor:
    """Of each class of each categorical, (..., categoricals x classes)."""
    soft = torch.softmax(by_class(logits, classes), -1)
    return ((1 - UNIFORM) * soft + UNIFORM / classes).flatten(-2)


def by_class(values: Tensor, classes: int) -> Tensor:
    """(..., categoricals x classes) as (..., categoricals, classes)."""
    return values.reshape(*values.shape[:-1], -1, classes)


def rollout_reference(cell: Cell, h: Tensor, z: Tensor, ticks: int, classes: int) -> Tensor:
    """What `rollout` must compute."""
    h, z = h[:, None], z[:, None]
    states = []
    for _ in range(ticks):
        h = gru(cell, z, h)
        z = probabilities(torch.baddbmm(cell.prior_bias, h, cell.prior), classes)
        states.append(torch.cat([h, z], -1))
    return torch.cat(states, 1)


@torch.no_grad()
def rollout(cell: Cell, h: Tensor, z: Tensor, ticks: int, classes: int, use_triton: bool | None = None) -> Tensor:
    """The states of the next ticks.

    Args:
        cell: The weights.
        h: (members, d), where it starts; d a power of 2 of at least 16.
        z: (members, z), likewise.
        ticks: How far.
        classes: Of each categorical.
        use_triton: Whether the kernel runs; by default for CUDA tensors. On a CPU it needs Triton's interpreter.

    Returns:
        (members, ticks, d + z): h and z of each.
    """
    if not ((h.is_cuda and tl is not None) if use_triton is None else use_triton):
        return rollout_reference(cell, h, z, ticks, classes)
    (members, d), width = h.shape, z.shape[-1]
    states = torch.empty(members, ticks + 1, d + width, device=h.device)
    states[:, 0, :d], states[:, 0, d:] = h, z
    rollout_pass[(members,)](
        states, *cell, ticks, D=d, Z=width, CLASSES=classes, UNIFORM=UNIFORM, TILE=TILE, num_warps=WARPS
    )
    return states[:, 1:]


@jit
def product(
    vector: tensor, matrix: tensor, width: tensor, column: tensor, INPUTS: constexpr, TILE: constexpr,  # noqa: N803
) -> tensor:  # fmt: skip
    """One row times some columns of a matrix of `width` columns, both in memory."""
    total = tl.zeros([column.shape[0]], tl.float32)
    for start in range(0, INPUTS, TILE):
        place = start + tl.arange(0, TILE)
        weights = tl.load(matrix + place[:, None] * width + column[None, :])
        total += tl.sum(weights * tl.load(vector + place)[:, None], axis=0)
    return total


@jit
def rollout_pass(
    states: tensor, w_input: tensor, b_input: tensor, w_hidden: tensor, b_hidden: tensor, w_prior: tensor,
    b_prior: tensor, ticks: tensor,
    D: constexpr, Z: constexpr, CLASSES: constexpr, UNIFORM: constexpr, TILE: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """A member for each program. What a tick has computed goes through memory to the next."""
    member = tl.program_id(0)
    state = states + member * (ticks + 1) * (D + Z)
    w_input, b_input = w_input + member * Z * 3 * D, b_input + member * 3 * D
    w_hidden, b_hidden = w_hidden + member * D * 3 * D, b_hidden + member * 3 * D
    w_prior, b_prior = w_prior + member * D * Z, b_prior + member * Z
    j, c = tl.arange(0, D), tl.arange(0, Z)
    for _ in range(ticks):
        h = tl.load(state + j)
        r = product(state + D, w_input, 3 * D, j, Z, TILE) + tl.load(b_input + j)
        r += product(state, w_hidden, 3 * D, j, D, TILE) + tl.load(b_hidden + j)
        u = product(state + D, w_input, 3 * D, D + j, Z, TILE) + tl.load(b_input + D + j)
        u += product(state, w_hidden, 3 * D, D + j, D, TILE) + tl.load(b_hidden + D + j)
        k = product(state, w_hidden, 3 * D, 2 * D + j, D, TILE) + tl.load(b_hidden + 2 * D + j)
        n = product(state + D, w_input, 3 * D, 2 * D + j, Z, TILE) + tl.load(b_input + 2 * D + j)
        n = 2 * tl.sigmoid(2 * (n + tl.sigmoid(r) * k)) - 1  # tanh
        u = tl.sigmoid(u)
        state += D + Z
        tl.store(state + j, (1 - u) * n + u * h)
        tl.debug_barrier()
        logits = product(state, w_prior, Z, c, D, TILE) + tl.load(b_prior + c)
        by_class = tl.reshape(logits, [Z // CLASSES, CLASSES])
        raised = tl.exp(by_class - tl.max(by_class, axis=1)[:, None])
        soft = raised / tl.sum(raised, axis=1)[:, None]
        tl.store(state + D + c, tl.reshape((1 - UNIFORM) * soft + UNIFORM / CLASSES, [Z]))
        tl.debug_barrier()
