"""The 64 features of the training state in one launch: Triton on a GPU, the reference elsewhere.

Nothing waits for the device: the ring of recent steps is there already, and the features stay there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtrainer.kernels import feature_reference
from hybridtrainer.kernels.feature_reference import COLUMNS, LEAST_SPREAD, LENGTH, LIMIT, NAMES, TINY
from hybridtrainer.kernels.quant import jit

try:
    import triton.language as tl
    from triton.language import constexpr, tensor
except ImportError:
    tl = constexpr = tensor = None

WARPS = 4
PARTS = 7  # programs, which compute a part of the features each
CHUNK = 16  # losses that all others are compared with at once


@torch.no_grad()
def features(rows: Tensor, count: int, use_triton: bool | None = None) -> Tensor:
    """The features of the newest step, as `feature_reference.features` defines them.

    Args:
        rows: (LENGTH, len(COLUMNS)), fp32, contiguous: a ring; the row of step n is n % LENGTH, counted from 0.
        count: Steps written so far, at least 1.
        use_triton: Whether the kernel runs; by default for CUDA tensors. On a CPU it needs Triton's interpreter.

    >>> found = features(torch.ones(LENGTH, len(COLUMNS)), count=1)
    >>> found.shape, found[NAMES.index("loss_newest")].item()
    (torch.Size([64]), 0.0)
    """
    if not ((rows.is_cuda and tl is not None) if use_triton is None else use_triton):
        return feature_reference.features(rows, count)
    out = torch.empty(len(NAMES), dtype=torch.float32, device=rows.device)
    # The place of the newest row and what is known are the only numbers that change; past the ring's length one does.
    feature_pass[(PARTS,)](
        rows, out, (count - 1) % LENGTH, min(count, LENGTH),
        LENGTH=LENGTH, WIDTH=len(COLUMNS), LEAST=LEAST_SPREAD, TINY=TINY, LIMIT=LIMIT, CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip
    return out


@jit
def mean_of(values: tensor, age: tensor, known: tensor, WINDOW: constexpr) -> tensor:  # noqa: N803
    """Of the newest WINDOW, or of all that are known."""
    n = tl.minimum(known, WINDOW)
    return tl.sum(tl.where(age < n, values, 0.0)) / n


@jit
def slope_of(values: tensor, age: tensor, known: tensor, WINDOW: constexpr) -> tensor:  # noqa: N803
    """Per step, of the line through the newest: sum (t - mean t) y / sum (t - mean t)^2."""
    n = tl.minimum(known, WINDOW).to(tl.float32)
    time = tl.where(age < n, (n - 1) / 2 - age, 0.0)
    return tl.sum(time * values) / tl.maximum(n * (n * n - 1) / 12, 0.5)


@jit
def spread_of(values: tensor, age: tensor, known: tensor, WINDOW: constexpr) -> tensor:  # noqa: N803
    """Standard deviation of the newest around their line."""
    n = tl.minimum(known, WINDOW)
    slope = slope_of(values, age, known, WINDOW)
    rest = values - mean_of(values, age, known, WINDOW) - slope * ((n.to(tl.float32) - 1) / 2 - age)
    return tl.sqrt(tl.sum(tl.where(age < n, rest * rest, 0.0)) / n)


@jit
def log_of(value: tensor, TINY: constexpr) -> tensor:  # noqa: N803
    """The logarithm of the size."""
    return tl.log(tl.maximum(tl.abs(value), TINY))


@jit
def put(out: tensor, place: tensor, value: tensor, LIMIT: constexpr) -> tensor:  # noqa: N803
    """Stores a feature and gives the place of the next."""
    tl.store(out + place, tl.minimum(tl.maximum(value, -LIMIT), LIMIT))
    return place + 1


@jit
def loss_part(
    out: tensor, here: tensor, age: tensor, known: tensor, units: tensor, level: tensor, spread: tensor,
    LEAST: constexpr, TINY: constexpr, LIMIT: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """What is told of losses but their ranks; windows are powers of 2."""
    at = put(out, 0, (tl.load(here) - level) / spread, LIMIT)
    for window in tl.static_range(2, 9):
        if window != 5:
            at = put(out, at, mean_of(units, age, known, 1 << window), LIMIT)
    for window in tl.static_range(3, 9):
        at = put(out, at, slope_of(units, age, known, 1 << window) * (1 << window), LIMIT)
    for window in tl.static_range(3, 9):
        if window != 6:
            at = put(out, at, tl.log(spread_of(units, age, known, 1 << window) + LEAST), LIMIT)
    put(out, at + 9, log_of(spread / (tl.abs(level) + TINY), TINY), LIMIT)


@jit
def rank_part(
    out: tensor, at: tensor, rows: tensor, newest: tensor, age: tensor, known: tensor, units: tensor, level: tensor,
    spread: tensor, LENGTH: constexpr, WIDTH: constexpr, LIMIT: constexpr, CHUNK: constexpr, WINDOW: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """The losses of a window with the ranks nearest to 10, 50 and 90%; of equal ones the newer comes first."""
    n = tl.minimum(known, WINDOW)
    rank = tl.zeros([LENGTH], tl.int32)
    for start in range(0, WINDOW, CHUNK):
        others = start + tl.arange(0, CHUNK)
        loss = tl.load(rows + ((newest - others + LENGTH) % LENGTH) * WIDTH, others < n, 0.0)
        other = ((loss - level) / spread)[None, :]
        ties = (other == units[:, None]) & (others[None, :] < age[:, None])
        before = ((other < units[:, None]) | ties) & (others < n)[None, :]
        rank += tl.sum(before.to(tl.int32), axis=1)
    for percent in tl.static_range(10, 91, 40):
        chosen = (age < n) & (rank == (percent * (n - 1) + 50) // 100)
        at = put(out, at, tl.sum(tl.where(chosen, units, 0.0)), LIMIT)


@jit
def norm_part(
    out: tensor, at: tensor, row: tensor, age: tensor, known: tensor, units: tensor, norm_here: tensor,
    TINY: constexpr, LIMIT: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """What is told of gradient norms."""
    norm = log_of(tl.load(row + 1, age < known, 0.0), TINY)
    norm_level = mean_of(norm, age, known, 32)
    norm = tl.where(age < known, norm - norm_level, 0.0)
    at = put(out, at, norm_here - norm_level, LIMIT)
    for window in tl.static_range(2, 9, 2):
        at = put(out, at, mean_of(norm, age, known, 1 << window), LIMIT)
    for window in tl.static_range(4, 9, 2):
        at = put(out, at, slope_of(norm, age, known, 1 << window) * (1 << window), LIMIT)
    for window in tl.static_range(4, 9, 2):
        at = put(out, at, spread_of(norm, age, known, 1 << window), LIMIT)
    n = tl.minimum(known, 64)
    one = tl.where(age < n, units - mean_of(units, age, known, 64), 0.0)
    other = tl.where(age < n, norm - mean_of(norm, age, known, 64), 0.0)
    both = tl.sqrt(tl.sum(one * one) / n * (tl.sum(other * other) / n) + TINY)
    put(out, at, tl.sum(one * other) / n / both, LIMIT)


@jit
def moment_part(
    out: tensor, at: tensor, row: tensor, here: tensor, age: tensor, known: tensor, norm_here: tensor,
    TINY: constexpr, LIMIT: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """What is told of the optimizer's moments."""
    first_here, second_here = log_of(tl.load(here + 3), TINY), log_of(tl.load(here + 4), TINY)
    first = tl.where(age < known, log_of(tl.load(row + 3, age < known, 0.0), TINY) - first_here, 0.0)
    second = tl.where(age < known, log_of(tl.load(row + 4, age < known, 0.0), TINY) - second_here, 0.0)
    at = put(out, at, first_here - second_here, LIMIT)
    at = put(out, at, slope_of(first, age, known, 64) * 64, LIMIT)
    at = put(out, at, slope_of(second, age, known, 64) * 64, LIMIT)
    at = put(out, at, -mean_of(first, age, known, 32), LIMIT)
    at = put(out, at, -mean_of(second, age, known, 32), LIMIT)
    at = put(out, at, mean_of(second, age, known, 64) - mean_of(first, age, known, 64), LIMIT)
    at = put(out, at, first_here - norm_here, LIMIT)
    put(out, at, spread_of(first, age, known, 64), LIMIT)


@jit
def rest_part(
    out: tensor, at: tensor, row: tensor, here: tensor, age: tensor, known: tensor,
    TINY: constexpr, LIMIT: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """What is told of learning rates, the clock, phases and forecast errors."""
    rate_here = log_of(tl.load(here + 2), TINY)
    rate = tl.where(age < known, log_of(tl.load(row + 2, age < known, 0.0), TINY) - rate_here, 0.0)
    at = put(out, at, -tl.max(rate), LIMIT)
    at = put(out, at, -mean_of(rate, age, known, 32), LIMIT)
    at = put(out, at, -mean_of(rate, age, known, 256), LIMIT)
    for column in tl.static_range(10, 13):
        at = put(out, at, log_of(tl.load(here + column), TINY) - rate_here, LIMIT)
    at = put(out, at, slope_of(rate, age, known, 32) * 32, LIMIT)
    at = put(out, at, tl.log(tl.maximum(tl.load(here + 9), 1.0)) / 2, LIMIT)
    at = put(out, at, tl.load(here + 5), LIMIT)
    at = put(out, at, tl.load(here + 6), LIMIT)
    for column in tl.static_range(7, 9):
        at = put(out, at, log_of(tl.load(here + column) + 1, TINY) / 2, LIMIT)
    size = 0.0
    for column in tl.static_range(13, 16):
        error = tl.load(here + column)
        size += tl.abs(error) / 3
        at = put(out, at, error, LIMIT)
    put(out, at, size, LIMIT)


@jit
def feature_pass(
    rows: tensor, out: tensor, newest: tensor, known: tensor,
    LENGTH: constexpr, WIDTH: constexpr, LEAST: constexpr, TINY: constexpr, LIMIT: constexpr,  # noqa: N803
    CHUNK: constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Each program its part, at its place in the order of `NAMES`: rows by age, newest first, in registers."""
    part = tl.program_id(0)
    age = tl.arange(0, LENGTH)
    row = rows + ((newest - age + LENGTH) % LENGTH) * WIDTH
    here = rows + newest * WIDTH
    loss = tl.load(row, age < known, 0.0)
    level = mean_of(loss, age, known, 32)
    centred = tl.where(age < known, loss - level, 0.0)
    spread = spread_of(centred, age, known, 64) + LEAST * tl.abs(level) + TINY
    units = centred / spread
    norm_here = log_of(tl.load(here + 1), TINY)
    if part == 0:
        rank_part(out, 24, rows, newest, age, known, units, level, spread, LENGTH, WIDTH, LIMIT, CHUNK, 256)
    elif part == 1:
        rank_part(out, 21, rows, newest, age, known, units, level, spread, LENGTH, WIDTH, LIMIT, CHUNK, 64)
    elif part == 2:
        rank_part(out, 18, rows, newest, age, known, units, level, spread, LENGTH, WIDTH, LIMIT, CHUNK, 16)
    elif part == 3:
        loss_part(out, here, age, known, units, level, spread, LEAST, TINY, LIMIT)
    elif part == 4:
        norm_part(out, 28, row, age, known, units, norm_here, TINY, LIMIT)
    elif part == 5:
        moment_part(out, 40, row, here, age, known, norm_here, TINY, LIMIT)
    else:
        rest_part(out, 48, row, here, age, known, TINY, LIMIT)
