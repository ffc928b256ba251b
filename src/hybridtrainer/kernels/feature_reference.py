"""The 64 numbers of the training state in plain PyTorch: what the kernel must compute, and what runs without a GPU.

The newest steps are rows of a ring, oldest first to be overwritten. Everything about losses is told in units of their
spread around the level of the newest 32, so that it means the same in every run; everything about norms, moments and
rates is a difference of logarithms. What is not known yet is 0.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

LENGTH = 256  # steps that the ring remembers
COLUMNS = (
    "loss", "grad_norm", "rate", "first_moment", "second_moment", "warmup", "correct", "steps_in_phase",
    "steps_since_jump", "clock", "rate_ahead_5", "rate_ahead_20", "rate_ahead_50", "error_5", "error_20", "error_50",
)  # fmt: skip
"""What a row says of a step. Rates ahead are means over so many steps; errors are in spreads."""
LOSS, NORM, RATE, FIRST, SECOND, RATIO = range(6)
PHASE, STEPS, CLOCK, AHEAD, ERRORS = slice(5, 7), slice(7, 9), slice(9, 10), slice(10, 13), slice(13, 16)
WINDOWS = (4, 8, 16, 32, 64, 128, 256)

LEVELS = (4, 8, 16, 64, 128, 256)
TRENDS = (8, 16, 32, 64, 128, 256)
SPREADS = (8, 16, 32, 128, 256)
RANKED = (16, 64, 256)
PERCENTS = (10, 50, 90)
NORM_LEVELS = (4, 16, 64, 256)
NORM_WINDOWS = (16, 64, 256)
NEAR, FAR = 32, 64
"""Of how many steps the level and the spread are that all losses are measured in."""
LEAST_SPREAD = 1e-3
"""Of the level: smoother curves are not told from straight ones."""
TINY = 1e-12
LIMIT = 8.0
"""No feature is larger: what is further out says no more than that."""

NAMES: tuple[str, ...] = (
    "loss_newest",
    *(f"loss_level_{n}" for n in LEVELS),
    *(f"loss_trend_{n}" for n in TRENDS),
    *(f"loss_spread_{n}" for n in SPREADS),
    *(f"loss_p{q}_{n}" for n in RANKED for q in PERCENTS),
    "loss_noise",
    "norm_newest",
    *(f"norm_level_{n}" for n in NORM_LEVELS),
    *(f"norm_trend_{n}" for n in NORM_WINDOWS),
    *(f"norm_spread_{n}" for n in NORM_WINDOWS),
    "norm_loss_correlation",
    "moment_ratio", "first_moment_trend", "second_moment_trend", "first_moment_change", "second_moment_change",
    "moment_ratio_change", "first_moment_share", "first_moment_spread",
    "rate_of_peak", "rate_of_near", "rate_of_all", "rate_ahead_5", "rate_ahead_20", "rate_ahead_50", "rate_falling",
    "clock",
    "phase_warmup", "phase_correct", "steps_in_phase", "steps_since_jump",
    "error_5", "error_20", "error_50", "error_size",
)  # fmt: skip


def features(rows: Tensor, count: int) -> Tensor:
    """The features of the newest step, in the order of `NAMES`, fp32; computed in fp64.

    Args:
        rows: (LENGTH, len(COLUMNS)), fp32: a ring; the row of step n is n % LENGTH, counted from 0.
        count: Steps written so far, at least 1.
    """
    known = min(count, LENGTH)
    order = (count - 1 - torch.arange(known, device=rows.device)) % LENGTH
    by_age = rows[order].T.double()  # (columns, known), newest first
    newest = by_age[:, 0]
    means, times, scales, lengths = _windows(known, rows.device)
    near, far, all_of_it = WINDOWS.index(NEAR), WINDOWS.index(FAR), WINDOWS.index(LENGTH)

    loss = by_age[LOSS]
    level = means[near] @ loss
    spread = _around_line((loss - level)[None], means, times, scales)[0, far] + LEAST_SPREAD * level.abs() + TINY
    logs = by_age[: SECOND + 1].abs().clamp(min=TINY).log()
    logs[LOSS] = (loss - level) / spread
    series = torch.cat([logs, logs[FIRST : FIRST + 1] - logs[SECOND : SECOND + 1]])  # the last is the moments' ratio
    levels = series @ means.T  # (series, windows)
    trends = series @ times.T * lengths
    spreads = _around_line(series, means, times, scales)
    at = series[:, 0]
    found = [
        at[LOSS : LOSS + 1], levels[LOSS, _places(LEVELS)], trends[LOSS, _places(TRENDS)],
        (spreads[LOSS, _places(SPREADS)] + LEAST_SPREAD).log(), *(_ranked(series[LOSS], n) for n in RANKED),
        _log(spread / (level.abs() + TINY))[None],
        at[NORM : NORM + 1] - levels[NORM, near], levels[NORM, _places(NORM_LEVELS)] - levels[NORM, near],
        trends[NORM, _places(NORM_WINDOWS)], spreads[NORM, _places(NORM_WINDOWS)],
        _correlation(series[LOSS], series[NORM], means[far])[None],
        at[RATIO:], trends[FIRST:RATIO, far], at[FIRST:RATIO] - levels[FIRST:RATIO, near],
        at[RATIO:] - levels[RATIO:, far], at[FIRST : FIRST + 1] - at[NORM], spreads[FIRST : FIRST + 1, far],
        at[RATE] - torch.stack([series[RATE].max(), levels[RATE, near], levels[RATE, all_of_it]]),
        _log(newest[AHEAD]) - at[RATE], trends[RATE : RATE + 1, near], _log(newest[CLOCK].clamp(min=1)) / 2,
        newest[PHASE], _log(newest[STEPS] + 1) / 2, newest[ERRORS], newest[ERRORS].abs().mean()[None],
    ]  # fmt: skip
    return torch.cat(found).clamp(-LIMIT, LIMIT).float()


@lru_cache(maxsize=2)
def _windows(known: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a series, newest first, is multiplied by for its mean and slope in each window; the slope's part; lengths.

    A window longer than what is known is as long as that.
    """
    age = torch.arange(known, device=device, dtype=torch.float64)
    n = torch.tensor([min(window, known) for window in WINDOWS], device=device, dtype=torch.float64)[:, None]
    inside = (age < n).double()
    time = ((n - 1) / 2 - age) * inside
    squares = (n * (n * n - 1) / 12).clamp(min=0.5)  # that of two steps; one has no slope
    lengths = torch.tensor(WINDOWS, device=device, dtype=torch.float64)
    return inside / n, time / squares, squares[:, 0] / n[:, 0], lengths


def _around_line(series: Tensor, means: Tensor, times: Tensor, scales: Tensor) -> Tensor:
    """Standard deviation of each series around its line in each window."""
    variance = series.square() @ means.T - (series @ means.T).square() - (series @ times.T).square() * scales
    return variance.clamp(min=0).sqrt()


def _places(windows: tuple[int, ...]) -> list[int]:
    return [WINDOWS.index(window) for window in windows]


def _ranked(values: Tensor, window: int) -> Tensor:
    """The values below which certain shares of the newest lie: some of these themselves, the nearest by rank."""
    n = min(window, len(values))
    return values[:n].sort().values[[(percent * (n - 1) + 50) // 100 for percent in PERCENTS]]


def _correlation(one: Tensor, other: Tensor, mean: Tensor) -> Tensor:
    a, b = one - mean @ one, other - mean @ other
    return mean @ (a * b) / ((mean @ (a * a)) * (mean @ (b * b)) + TINY).sqrt()


def _log(value: Tensor) -> Tensor:
    return value.abs().clamp(min=TINY).log()
