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
TILE = 4096  # weights that are read at once
MOST_PARTS = 16  # programs that share a member
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
    parts = parts_for(h.device, members, width // classes)
    states = torch.empty(members, ticks, d + width, device=h.device)
    met = torch.zeros(members, dtype=torch.int32, device=h.device)
    # Programs that wait for each other must all be running: a cooperative launch fails rather than waits for ever.
    together = {"launch_cooperative_grid": True} if parts > 1 else {}
    rollout_pass[(members, parts)](
        states, met, h.contiguous(), z.contiguous(), *cell, ticks, D=d, Z=width, CLASSES=classes, UNIFORM=UNIFORM,
        PARTS=parts, TILE=min(d, width, TILE * parts // max(d, width)), num_warps=WARPS, **together,
    )  # fmt: skip
    return states


def parts_for(device: torch.device, members: int, categoricals: int) -> int:
    """How many programs share a member: a power of 2, so few that all run at once; one where they run in turn."""
    if device.type != "cuda":
        return 1
    at_once = torch.cuda.get_device_properties(device).multi_processor_count // members
    return 1 << max(0, min(at_once, categoricals, MOST_PARTS).bit_length() - 1)


@jit
def product(
    total: tensor, vector: tensor, matrix: tensor, width: tensor, column: tensor,
    INPUTS: constexpr, TILE: constexpr,  # noqa: N803
) -> tensor:  # fmt: skip
    """Adds one row times some columns of a matrix of `width` columns, not summed over the inputs of a tile yet."""
    for start in range(0, INPUTS, TILE):
        place = start + tl.arange(0, TILE)
        weights = tl.load(matrix + place[:, None] * width + column[None, :])
        # Past the first level of cache, which knows nothing of what other programs write.
        total += weights * tl.load(vector + place, cache_modifier=".cg")[:, None]
    return total


@jit
def meet(met: tensor, target: tensor, PARTS: constexpr) -> None:  # noqa: N803
    """Waits until all programs of a member have come so far, and what they wrote can be read."""
    tl.debug_barrier()
    if PARTS > 1:
        seen = tl.atomic_add(met, 1, sem="acq_rel", scope="gpu") + 1
        while seen < target:
            seen = tl.atomic_add(met, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()


@jit
def rollout_pass(
    states: tensor, met: tensor, h: tensor, z: tensor, w_input: tensor, b_input: tensor, w_hidden: tensor,
    b_hidden: tensor, w_prior: tensor, b_prior: tensor, ticks: tensor,
    D: constexpr, Z: constexpr, CLASSES: constexpr, UNIFORM: constexpr, PARTS: constexpr, TILE: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Some programs for each member, each with its columns. What a tick computes goes through memory to the next."""
    member, part = tl.program_id(0), tl.program_id(1)
    met, state = met + member, states + member * ticks * (D + Z)
    h, z = h + member * D, z + member * Z
    w_input, b_input = w_input + member * Z * 3 * D, b_input + member * 3 * D
    w_hidden, b_hidden = w_hidden + member * D * 3 * D, b_hidden + member * 3 * D
    w_prior, b_prior = w_prior + member * D * Z, b_prior + member * Z
    j, c = part * (D // PARTS) + tl.arange(0, D // PARTS), part * (Z // PARTS) + tl.arange(0, Z // PARTS)
    nothing = tl.zeros([TILE, D // PARTS], tl.float32)
    for tick in range(ticks):
        r = product(nothing, z, w_input, 3 * D, j, Z, TILE)
        r = product(r, h, w_hidden, 3 * D, j, D, TILE)
        u = product(nothing, z, w_input, 3 * D, D + j, Z, TILE)
        u = product(u, h, w_hidden, 3 * D, D + j, D, TILE)
        k = product(nothing, h, w_hidden, 3 * D, 2 * D + j, D, TILE)
        n = product(nothing, z, w_input, 3 * D, 2 * D + j, Z, TILE)
        r = tl.sigmoid(tl.sum(r, axis=0) + tl.load(b_input + j) + tl.load(b_hidden + j))
        u = tl.sigmoid(tl.sum(u, axis=0) + tl.load(b_input + D + j) + tl.load(b_hidden + D + j))
        k = tl.sum(k, axis=0) + tl.load(b_hidden + 2 * D + j)
        n = tl.sum(n, axis=0) + tl.load(b_input + 2 * D + j)
        n = 2 * tl.sigmoid(2 * (n + r * k)) - 1  # tanh
        tl.store(state + j, (1 - u) * n + u * tl.load(h + j, cache_modifier=".cg"))
        meet(met, (2 * tick + 1) * PARTS, PARTS)
        logits = product(tl.zeros([TILE, Z // PARTS], tl.float32), state, w_prior, Z, c, D, TILE)
        logits = tl.sum(logits, axis=0) + tl.load(b_prior + c)
        by_class = tl.reshape(logits, [Z // PARTS // CLASSES, CLASSES])
        raised = tl.exp(by_class - tl.max(by_class, axis=1)[:, None])
        soft = raised / tl.sum(raised, axis=1)[:, None]
        tl.store(state + D + c, tl.reshape((1 - UNIFORM) * soft + UNIFORM / CLASSES, [Z // PARTS]))
        meet(met, (2 * tick + 2) * PARTS, PARTS)
        h, z, state = state, state + D, state + D + Z
