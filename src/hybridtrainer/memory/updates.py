"""The update of one step: settings by parameter group, the gradient norm, clipping, and the check before each commit.

Nothing here waits for the device. Whether an update may be made is a number on the device that the kernels read; the
host learns of it when the step ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer import ranks
from hybridtrainer.kernels.adam import update_
from hybridtrainer.kernels.reference import Hyper
from hybridtrainer.memory.layout import Target
from hybridtrainer.memory.portions import Portion
from hybridtrainer.memory.units import Unit
from hybridtrainer.replicas import mean_

LAST_NORM = "last_norm"  # in the first parameter group, so that checkpoints have it
EPSILON = 1e-6  # as torch's own clipping has it


class Updates:
    """Gathers what a step needs to know about all gradients while they pass by one block at a time.

    Args:
        groups: The optimizer's parameter groups, live.
        parameters: All trainable parameters, in the order in which their norms are summed.
        clip_norm: Largest global gradient norm; None does not clip.
        seed: Of stochastic rounding.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        parameters: Sequence[nn.Parameter],
        units: int,
        device: torch.device,
        clip_norm: float | None,
        seed: int,
    ) -> None:
        self.clip_norm = clip_norm
        self._first_group = groups[0]
        self._groups = {id(parameter): group for group in groups for parameter in group["params"]}
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._units = units
        self._device = device
        self._seed = seed
        self._one = torch.ones((), device=device)
        self.yes = torch.ones((), dtype=torch.int32, device=device)
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._norms: dict[int, Tensor] = {}
        self._allowed: dict[int, Tensor] = {}  # by unit
        self._ok = self.yes

    def watch_loss(self, loss: Tensor) -> None:
        """Allows updates only if the loss is finite, on every rank."""
        finite = torch.isfinite(loss.detach())
        if ranks.count() > 1:
            finite = torch.tensor(all(ranks.exchange("finite loss", bool(finite))))
        self._ok = self._ok * finite.to(self._device, torch.int32)

    def averaged(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """The same gradients, which are now the mean over all ranks: each of them has the unit in its slot."""
        mean_(gradients)
        return gradients

    @torch.no_grad()
    def measure(self, unit: Unit, gradients: Sequence[Tensor]) -> Tensor:
        """Takes note of the gradients of a unit. Returns their norm, in fp32."""
        norms = torch._foreach_norm(list(gradients))
        for (_, parameter), norm in zip(unit.trainable, norms, strict=True):
            self._norms[self._numbers[id(parameter)]] = norm
        return _norm(torch.stack(norms).float())

    def admit(self, unit: Unit, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The factor of a unit's gradients in a fused update, and whether it may be made.

        The global norm is known only when all is done, so the last step's stands for it; where one unit alone exceeds
        it, that one does. In the first step all units count as alike.
        """
        self._ok = self._ok * (norm < math.inf)  # `isfinite` of what is not negative, in one operation instead of five
        self._allowed[unit.key] = self._ok
        if self.clip_norm is None:
            return self._one, self._ok
        last = self._first_group[LAST_NORM]
        expected = norm * self._units**0.5 if last is None else norm.clamp(min=last)
        return self._clip_factor(expected), self._ok

    def norm(self) -> Tensor:
        """The global norm of all gradients that were measured."""
        if not self._norms:
            return torch.zeros((), device=self._device)
        return _norm(torch.stack([self._norms[number] for number in sorted(self._norms)]))

    def is_finite(self) -> bool:
        """Whether loss and gradients of this step are; waits for the device."""
        return bool(self._ok * torch.isfinite(self.norm()).to(torch.int32))

    def exact_factor(self) -> Tensor:
        """The factor that brings the global norm down to `clip_norm`."""
        return self._one if self.clip_norm is None else self._clip_factor(self.norm())

    def end(self) -> dict[int, bool]:
        """Ends the step; waits for the device. Returns which units were updated, of those that were admitted."""
        norm = self.norm()
        keys = list(self._allowed)
        *flags, value = torch.stack([*self._allowed.values(), norm]).tolist()
        if self._norms and math.isfinite(value):
            self._first_group[LAST_NORM] = value
        self.begin()
        return {key: bool(flag) for key, flag in zip(keys, flags, strict=True)}

    def hyper(self, parameter: nn.Parameter, steps: int) -> Hyper:
        """The settings of a parameter's update number `steps`."""
        group = self._groups[id(parameter)]
        beta1, beta2 = group["betas"]
        return Hyper(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=steps,
            seed=self._seed,
            tensor=self._numbers[id(parameter)],
        )

    def _clip_factor(self, norm: Tensor) -> Tensor:
        assert self.clip_norm is not None
        return (self.clip_norm / (norm + EPSILON)).clamp(max=1.0)


def _norm(norms: Tensor) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(norms)
    return total


class Gatherer:
    """Puts the gradients of vectors side by side, as the vectors are, in memory that is made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Tensor, list[Tensor]]] = {}

    def __call__(self, target: Target, gradients: Sequence[Tensor]) -> Tensor:
        """The gradient of a target, flat."""
        own = [gradients[number].reshape(-1) for number, _ in target.members]
        if len(own) == 1:
            return own[0]
        key = (target.members, own[0].dtype)
        if key not in self._known:
            whole = torch.zeros(target.weight.elements, dtype=own[0].dtype, device=own[0].device)
            places = [whole[start : start + len(each)] for (_, start), each in zip(target.members, own, strict=True)]
            self._known[key] = whole, places
        whole, places = self._known[key]
        torch._foreach_copy_(places, own)
        return whole


def apply_(
    portion: Portion,
    states: Sequence[Mapping[str, Tensor]],
    targets: Sequence[Target],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    hyper: Sequence[Hyper],
    scale: Tensor,
    ok: Tensor,
    gather: Gatherer,
) -> None:
    """Updates in place those parts of a unit's targets whose states are in a portion.

    Args:
        states: Of each part.
        weights: Of each target.
        gradients: Of the unit's trainable entries.
        hyper: Settings of each target.
    """
    for part, state in zip(portion.parts, states, strict=True):
        target, settings = targets[part.target], hyper[part.target]
        weight, gradient = weights[part.target].view(-1), gather(target, gradients)
        if part.elements < target.weight.elements:
            own = slice(part.start, part.start + part.elements)
            weight, gradient, settings = weight[own], gradient[own], replace(settings, first_element=part.start)
        update_(target.format, weight, state, gradient, settings, scale, ok)
