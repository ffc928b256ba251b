"""Simple forecasters: what the next steps will do to the weights, judging by the windows before.

Each proposes, for each group of weights, a combination of recorded windows. They see inner products and
learning-rate times, never a weight, so a forecast costs microseconds: these are a few hundred numbers, which numpy
multiplies in less time than torch takes to be asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridtrainer.predict import directions
from hybridtrainer.predict.curves import Array

MIN_WINDOWS = 2
OUTER_DECAY = 0.8
MOMENTUM_DECAY = 0.9


@dataclass(frozen=True)
class Past:
    """What the recorded windows say, group by group.

    Attributes:
        gram: Inner products of the windows, (groups, windows, windows).
        tau: Learning-rate time of each window, (groups, windows).
    """

    gram: Tensor
    tau: Tensor

    @property
    def windows(self) -> int:
        """How many there are."""
        return self.tau.shape[1]


@dataclass(frozen=True)
class Forecast:
    """A proposed displacement.

    Attributes:
        forecaster: Who proposes it.
        horizon_steps: How many steps it stands for.
        coefficients: What each window counts in each group, (groups, windows).
        denoise: The way from the present weights to their recent average, (groups, windows).
        momentum_time: Learning-rate time along the optimizer's momentum, (groups,); None for windows only.
        confidence: Expected cosine between this displacement and the true drift, 0 to 1.
        norm_ratio: Its length over that of the newest window scaled to the same time.
    """

    forecaster: str
    horizon_steps: int
    coefficients: Tensor
    denoise: Tensor
    momentum_time: Tensor | None
    confidence: float
    norm_ratio: float


def _line_fit(tau: Tensor) -> Tensor:
    return directions.slope(tau)


def _curve(tau: Tensor) -> Tensor:
    # Velocity at the present under constant acceleration: the mean velocity is that of half a span ago.
    return directions.drift(tau) + directions.acceleration(tau) * tau.sum() / 2


def _outer_momentum(tau: Tensor) -> Tensor:
    return directions.drift(tau, decay=OUTER_DECAY)


VELOCITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "drift": directions.drift,
    "line_fit": _line_fit,
    "outer_momentum": _outer_momentum,
    "persistence": directions.newest,
    "curve": _curve,
}
"""Forecasters from windows: the coefficients of the velocity each expects."""
AVERAGING = ("drift", "line_fit", "outer_momentum")
"""Those in which the noise of single windows averages out: the others follow it, and far jumps swing."""


def forecast(name: str, past: Past, horizon_steps: int, ahead: Tensor, trust_radius: float) -> Forecast:
    """What forecaster `name` expects of the next `horizon_steps`.

    Args:
        name: A key of `VELOCITIES`, "momentum", or "auto" for the most confident of `AVERAGING`.
        past: The recorded windows; at least two, but for "momentum".
        horizon_steps: How far to look.
        ahead: Learning-rate time of those steps for each group, (groups,).
        trust_radius: Longest displacement of a group, relative to that of its newest window.
    """
    if name == "momentum":
        none = torch.zeros_like(past.tau)
        # Without new gradients momentum fades: step k still moves MOMENTUM_DECAY ** k of the first.
        fading = sum(MOMENTUM_DECAY**k for k in range(1, horizon_steps + 1)) / horizon_steps
        length = fading * trust_radius
        return Forecast(name, horizon_steps, none, none, ahead * length, _agreement(past), length)
    grams, taus, times = past.gram.numpy(), past.tau.numpy(), ahead.tolist()
    moving = [group for group, gram in enumerate(grams) if gram.trace() > 0]
    drifts = {group: _drift_square(grams[group], taus[group]) for group in moving}
    # Groups with the same learning rate have the same times, and so the same velocities.
    rows = past.tau.tolist()
    alike = {group: rows.index(rows[group]) for group in moving}
    found: list[tuple[float, str, Array]] = []
    for each in AVERAGING if name == "auto" else [name]:
        velocities = {group: VELOCITIES[each](past.tau[group]).numpy() for group in set(alike.values())}
        chosen = np.zeros_like(taus)
        for group in moving:
            wanted = velocities[alike[group]] * times[group]
            chosen[group] = _within(wanted, grams[group], trust_radius)
        found.append((_confidence(grams, taus, chosen, drifts), each, chosen))
    sure, best, chosen = max(found, key=lambda candidate: candidate[0])
    return Forecast(
        forecaster=best,
        horizon_steps=horizon_steps,
        coefficients=torch.from_numpy(chosen),
        denoise=directions.denoise(past.tau[0]).repeat(len(past.tau), 1),
        momentum_time=None,
        confidence=sure,
        norm_ratio=_norm_ratio(grams, taus, chosen, times),
    )


def _within(coefficients: Array, gram: Array, newest_windows: float) -> Array:
    """The displacement, no longer than so many times the newest window."""
    length = math.sqrt(max(float(coefficients @ gram @ coefficients), 0.0))
    limit = newest_windows * math.sqrt(gram[-1, -1])
    return coefficients * (limit / length) if length > limit else coefficients


def _drift_square(gram: Array, tau: Array) -> float:
    """The squared velocity of the drift, if windows are drift plus independent noise.

    Then it is the inner product of two different windows over the product of their times.
    """
    products = gram.sum() - gram.trace()
    times = tau.sum() ** 2 - (tau * tau).sum()
    return max(float(products / times), 0.0)


def _confidence(grams: Array, taus: Array, coefficients: Array, drifts: Mapping[int, float]) -> float:
    """Expected cosine between the displacement and the drift: it follows from the length, which holds noise too."""
    along = length = signal = 0.0
    for group, drift_square in drifts.items():
        c = coefficients[group]
        if not c.any():
            continue
        along += float(c @ taus[group]) * drift_square
        length += float(c @ grams[group] @ c)
        signal += drift_square
    if length <= 0 or signal <= 0:
        return 0.0
    return min(1.0, max(0.0, along / math.sqrt(length * signal)))


def confidence(past: Past, coefficients: Tensor) -> float:
    """Expected cosine between a displacement and the drift; groups that stay where they are do not count."""
    grams, taus = past.gram.numpy(), past.tau.numpy()
    drifts = {group: _drift_square(grams[group], taus[group]) for group in range(len(taus))}
    return _confidence(grams, taus, coefficients.numpy(), drifts)


def _agreement(past: Past) -> float:
    if past.windows < MIN_WINDOWS:
        return 0.0
    return confidence(past, torch.stack([directions.drift(tau) for tau in past.tau]))


def _norm_ratio(grams: Array, taus: Array, coefficients: Array, ahead: Sequence[float]) -> float:
    length = newest = 0.0
    for gram, tau, c, time in zip(grams, taus, coefficients, ahead, strict=True):
        length += max(float(c @ gram @ c), 0.0)
        newest += float(gram[-1, -1]) * float(time / tau[-1]) ** 2
    return math.sqrt(length / newest) if newest > 0 else 0.0


def stack_past(gram: Tensor, window_times: Sequence[Sequence[float]], lr_groups: Sequence[int]) -> Past:
    """Brings the history's figures into the shape forecasters use.

    Args:
        gram: (groups, windows, windows).
        window_times: For each window, the learning-rate time of each optimizer group.
        lr_groups: For each weight group, its optimizer group.
    """
    tau = torch.tensor([[times[index] for times in window_times] for index in lr_groups], dtype=torch.float64)
    return Past(gram, tau.clamp(min=1e-30))
