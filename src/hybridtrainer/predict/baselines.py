"""Simple forecasters: what the next steps will do to the weights, judging by the windows before.

Each proposes, for each group of weights, a combination of recorded windows. They see inner products and
learning-rate times, never a weight, so a forecast costs microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrainer.predict import directions

MIN_WINDOWS = 2
NOISE_FACTOR = 1.2  # a group whose windows agree less than this, where 1 is pure noise, stays where it is
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
        coefficients: What each window counts in each group, (groups, windows); zero where a group stays.
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
    "persistence": directions.newest,
    "line_fit": _line_fit,
    "outer_momentum": _outer_momentum,
    "curve": _curve,
}
"""Forecasters from windows: the coefficients of the velocity each expects."""


def forecast(name: str, past: Past, horizon_steps: int, ahead: Tensor, trust_radius: float) -> Forecast:
    """What forecaster `name` expects of the next `horizon_steps`.

    Args:
        name: A key of `VELOCITIES`, "momentum", or "auto" for the most confident of them.
        past: The recorded windows; at least two, but for "momentum".
        horizon_steps: How far to look.
        ahead: Learning-rate time of those steps for each group, (groups,).
        trust_radius: Longest displacement of a group, relative to what its newest window moved in equal time.
    """
    if name == "momentum":
        none = torch.zeros_like(past.tau)
        # Without new gradients momentum fades: step k still moves MOMENTUM_DECAY ** k of the first.
        fading = sum(MOMENTUM_DECAY**k for k in range(1, horizon_steps + 1)) / horizon_steps
        length = fading * trust_radius
        return Forecast(name, horizon_steps, none, none, ahead * length, _agreement(past), length)
    moving = [group for group, gram in enumerate(past.gram) if is_signal(gram)]
    drifts = {group: _drift_square(past, group) for group in moving}
    found: list[tuple[float, str, Tensor]] = []
    for each in VELOCITIES if name == "auto" else [name]:
        coefficients = torch.zeros_like(past.tau)
        for group in moving:
            coefficients[group] = _group_coefficients(VELOCITIES[each], past, group, ahead[group], trust_radius)
        found.append((_confidence(past, coefficients, drifts), each, coefficients))
    sure, best, coefficients = max(found, key=lambda candidate: candidate[0])
    return Forecast(
        forecaster=best,
        horizon_steps=horizon_steps,
        coefficients=coefficients,
        denoise=torch.stack([directions.denoise(tau) for tau in past.tau]),
        momentum_time=None,
        confidence=sure,
        norm_ratio=_norm_ratio(past, coefficients, ahead),
    )


def _group_coefficients(
    velocity: Callable[[Tensor], Tensor], past: Past, group: int, ahead: Tensor, trust_radius: float
) -> Tensor:
    gram, tau = past.gram[group], past.tau[group]
    c = velocity(tau) * ahead
    length = math.sqrt(max(float(c @ gram @ c), 0.0))
    limit = trust_radius * math.sqrt(float(gram[-1, -1])) * float(ahead / tau[-1])
    return c * (limit / length) if length > limit else c


def is_signal(gram: Tensor) -> bool:
    """Whether the windows agree: the squared norm of their sum over the sum of their squared norms is 1 for noise."""
    own = float(gram.diagonal().sum())
    return own > 0 and float(gram.sum()) / own > NOISE_FACTOR


def _drift_square(past: Past, group: int) -> float:
    """The squared velocity of the drift, if windows are drift plus independent noise.

    Then it is the inner product of two different windows over the product of their times.
    """
    gram, tau = past.gram[group], past.tau[group]
    products = gram.sum() - gram.diagonal().sum()
    times = tau.sum() ** 2 - (tau**2).sum()
    return max(float(products / times), 0.0)


def _confidence(past: Past, coefficients: Tensor, drifts: Mapping[int, float]) -> float:
    """Expected cosine between the displacement and the drift: it follows from the length, which holds noise too."""
    along = length = signal = 0.0
    for group, drift_square in drifts.items():
        gram, tau, c = past.gram[group], past.tau[group], coefficients[group]
        if not c.any():
            continue
        along += float(c @ tau) * drift_square
        length += float(c @ gram @ c)
        signal += drift_square
    if length <= 0 or signal <= 0:
        return 0.0
    return min(1.0, max(0.0, along / math.sqrt(length * signal)))


def confidence(past: Past, coefficients: Tensor) -> float:
    """Expected cosine between a displacement and the drift; groups that stay where they are do not count."""
    return _confidence(past, coefficients, {group: _drift_square(past, group) for group in range(len(past.tau))})


def _agreement(past: Past) -> float:
    if past.windows < MIN_WINDOWS:
        return 0.0
    return confidence(past, torch.stack([directions.drift(tau) for tau in past.tau]))


def _norm_ratio(past: Past, coefficients: Tensor, ahead: Tensor) -> float:
    length = newest = 0.0
    for gram, tau, c, time in zip(past.gram, past.tau, coefficients, ahead, strict=True):
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
