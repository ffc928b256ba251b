"""Schedule-Free AdamW (Defazio et al., arXiv 2405.15682) as an arm to compare with: no schedule, averages instead.

Three sequences: z makes the steps, x is the average of all z, and gradients are taken at y between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class ScheduleFreeAdamW:
    """AdamW without a schedule. The parameters hold y, except inside `averaged`.

    Args:
        parameters: What is trained.
        lr: Its rate.
        beta: How near y is to x.
        beta2: Decay of the second moment.
        weight_decay: At y, times the rate.
        warmup: Steps over which the rate rises.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        beta: float = 0.9,
        beta2: float = 0.999,
        weight_decay: float = 0.0,
        warmup: int = 0,
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._lr, self._beta, self._beta2, self._decay, self._warmup = lr, beta, beta2, weight_decay, warmup
        self._z = [parameter.detach().clone() for parameter in self._parameters]
        self._x = [parameter.detach().clone() for parameter in self._parameters]
        self._v = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._steps, self._weights = 0, 0.0

    @torch.no_grad()
    def step(self) -> None:
        """Takes in the gradients, which are then freed."""
        self._steps += 1
        rate = self._lr * min(1.0, self._steps / max(1, self._warmup))
        self._weights += rate**2
        share = rate**2 / self._weights
        correction = 1 - self._beta2**self._steps
        for parameter, z, x, v in zip(self._parameters, self._z, self._x, self._v, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            v.mul_(self._beta2).addcmul_(gradient, gradient, value=1 - self._beta2)
            move = gradient / ((v / correction).sqrt() + 1e-8) + self._decay * parameter
            z.sub_(move, alpha=rate)
            x.lerp_(z, share)
            parameter.copy_(torch.lerp(z, x, self._beta))
            parameter.grad = None

    @torch.no_grad()
    def swap(self) -> None:
        """Lets parameters and the average change places: called twice, everything is as before."""
        for parameter, x in zip(self._parameters, self._x, strict=True):
            kept: Tensor = parameter.detach().clone()
            parameter.copy_(x)
            x.copy_(kept)


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Rate, decay and second moment as a torch optimizer has them."""
    group = optimizer.param_groups[0]
    return {"lr": group["lr"], "beta2": group["betas"][1], "weight_decay": group["weight_decay"]}
