"""Directions in which weights can be displaced, as coefficients over the recorded windows.

Window k moved the weights by d_k while the learning rate summed to tau_k ("learning-rate time"). Every function
here returns one coefficient for each window, oldest first, so that the direction is the sum of c_k d_k. The one
direction that does not come from windows is the optimizer's own momentum, `momentum_displace_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridtrainer.weights import Bucket, Segment, Weights

Coefficients = Tensor  # (windows,), fp64


@runtime_checkable
class KeepsMoments(Protocol):
    """An optimizer that keeps its moments in a form of its own, and reads them out itself."""

    def moments(self, parameter: nn.Parameter, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Both moments of a range of a parameter's elements in memory order, in fp32; None before its first update."""
        ...


def newest(tau: Tensor) -> Coefficients:
    """The newest window's velocity: d_K / tau_K."""
    coefficients = torch.zeros_like(tau)
    coefficients[-1] = 1 / tau[-1]
    return coefficients


def drift(tau: Tensor, decay: float = 1.0) -> Coefficients:
    """Mean velocity of all windows, each older one counting `decay` times the next: sum d_k / sum tau_k."""
    weights = decay ** torch.arange(len(tau) - 1, -1, -1, dtype=tau.dtype)
    return weights / (weights * tau).sum()


def slope(tau: Tensor) -> Coefficients:
    """Velocity of the straight line that fits the weights at all window ends best (least squares)."""
    ends = torch.cat([tau.new_zeros(1), tau.cumsum(0)])  # the clock at the K + 1 window ends
    centred = ends - ends.mean()
    # Weights at end j are the first weights plus d_1 ... d_j, so window k counts for every end from k on.
    return centred.flip(0).cumsum(0).flip(0)[1:] / (centred**2).sum()


def acceleration(tau: Tensor) -> Coefficients:
    """Change of velocity from the older to the newer half of the windows, per learning-rate time."""
    half = len(tau) // 2
    older, newer = tau[:half], tau[half:]
    coefficients = torch.cat([-torch.ones_like(older) / older.sum(), torch.ones_like(newer) / newer.sum()])
    return coefficients / (tau.sum() / 2)


def denoise(tau: Tensor) -> Coefficients:
    """From the present weights to the average of the weights at all window ends.

    The average of noisy weights has a lower loss at once, and the gain is gone a few steps later. So this is no
    direction to jump in; it is where jumps are judged, because there noise does not drown the drift.
    """
    count = len(tau)
    return -torch.arange(1, count + 1, dtype=tau.dtype) / (count + 1)


def has_moments(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps a first moment for every weight it has updated."""
    states = [state for state in optimizer.state.values() if state]
    return bool(states) and (isinstance(optimizer, KeepsMoments) or all(_moment_keys(state) for state in states))


@torch.no_grad()
def momentum_displace_(weights: Weights, optimizer: Optimizer, lr_time: Tensor) -> None:
    """Moves the weights as the optimizer's momentum alone would in `lr_time`, one value for each group.

    Adam's step is -lr m / (sqrt(v) + eps), that of SGD with momentum -lr b. No gradient is needed and nothing
    is stored.
    """
    for bucket in weights.buckets:
        time = lr_time[bucket.group].item()
        if time:
            bucket.add_(momentum(optimizer, bucket) * time)


def momentum(optimizer: Optimizer, bucket: Bucket) -> Tensor:
    """The step of a bucket's elements per learning rate, by momentum alone; 0 where the optimizer has none."""
    eps = {id(p): group.get("eps", 1e-8) for group in optimizer.param_groups for p in group["params"]}
    return torch.cat([_step_direction(optimizer, segment, eps[id(segment.parameter)]) for segment in bucket.segments])


def _moment_keys(state: Mapping[str, object]) -> tuple[str, ...]:
    if isinstance(state.get("momentum_buffer"), Tensor):
        return ("momentum_buffer",)
    if isinstance(state.get("exp_avg"), Tensor):
        second = next((key for key in ("exp_avg_sq", "exp_inf") if isinstance(state.get(key), Tensor)), None)
        return ("exp_avg", second) if second else ("exp_avg",)
    return ()


def _step_direction(optimizer: Optimizer, segment: Segment, eps: float) -> Tensor:
    """The step of a segment's elements per learning rate, on the device of its weights."""
    parameter = segment.parameter
    if isinstance(optimizer, KeepsMoments):
        moments = optimizer.moments(parameter, segment.start, segment.stop)
        if moments is not None:
            first, second = (moment.to(parameter.device) for moment in moments)
            return -first / (second.sqrt() + eps)
    state = optimizer.state.get(parameter, {})
    keys = _moment_keys(state)
    if not keys:
        return torch.zeros(segment.stop - segment.start, device=parameter.device)
    first = _piece(state[keys[0]], segment)
    if len(keys) == 1:
        return -first
    second = _piece(state[keys[1]], segment)
    return -first / ((second if keys[1] == "exp_inf" else second.sqrt()) + eps)


def _piece(moment: Tensor, segment: Segment) -> Tensor:
    """The part of a moment that belongs to a segment, in fp32 on its device, wherever the moment is kept."""
    parameter = segment.parameter
    if moment.stride() != parameter.stride():  # memory order is the parameter's own
        moment = torch.empty_like(parameter, dtype=moment.dtype).copy_(moment)
    return segment.view(moment).to(parameter.device).float()
