"""The newest ticks of a run, from which a model of the dynamics learns: features, forecasts, and what came of them.

What a model remembers (its latent state) is kept in 8 bits, a quarter of the memory. Features and latent states are on
the model's device, where they come from; what the host knows, forecasts and outcomes, stays on the host, and is sent
with the lesson that needs it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtrainer.tree import Tree

LENGTH = 512  # ticks
BATCH = 16  # ticks that a member learns from at once
LARGEST_TARGET = 4.0  # scales: an outlier counts no more
ALIKE = 1.0  # root mean square of the difference at which features are no longer alike
DOUBT = 32.0  # ticks without an error that are added to those that are like one


class Lesson(NamedTuple):
    """What a model learns from at once, each with (members, BATCH) first but where it says otherwise.

    Attributes:
        places: Of ticks in the ring; or of sequences of neighbours, (members, BATCH, length).
        noise: Whatever else the model draws, in its own shape.
        experts: (..., horizons, experts), of the last tick: simple forecasts, in scales from the blend's.
        weights: (..., horizons, experts), of the last tick: logarithms of what each counted.
        came: (..., horizons), of the last tick: in scales from the blend's forecast; no number where nothing has come.
        jumps: (..., 2), of the last tick: along and length of a forecast of the weights; likewise.
    """

    places: Tensor
    noise: Tensor
    experts: Tensor
    weights: Tensor
    came: Tensor
    jumps: Tensor

    def misfit(self, gates: Tensor, scale: Tensor) -> Tensor:
        """How badly corrected forecasts fit what came: the absolute error, and what its scale says of its size.

        The scale is judged by the negative log likelihood of a Laplace distribution, in which the error is taken as it
        is: it must not excuse a forecast that is wrong by being large.

        Args:
            gates: (..., horizons, experts), added to the logarithms of the weights.
            scale: (..., horizons), added to the logarithm of the scale.

        Returns:
            (..., horizons), 0 where nothing has come yet.
        """
        weights = torch.softmax(self.weights + gates, dim=-1)
        forecast = (weights * self.experts).sum(-1)
        known = torch.isfinite(self.came)
        error = torch.where(known, self.came - forecast, 0.0).abs()
        return torch.where(known, error + error.detach() * torch.exp(-scale) + scale, 0.0)

    def misjump(self, gain: Tensor) -> Tensor:
        """How badly forecasts of the weights fit what came, if they were exp(gain) times as long: (...), 0 where none.

        Args:
            gain: (...).
        """
        along, length = self.jumps.unbind(-1)
        known = torch.isfinite(along)
        factor = gain.exp()
        error = torch.where(known, length, 0.0) * factor.square() - 2 * torch.where(known, along, 0.0) * factor
        return torch.where(known, error, 0.0)


class Replay:
    """A ring of ticks.

    Args:
        features: Numbers of a tick.
        horizons: How far ahead forecasts look, how many.
        experts: Simple forecasts for each.
        latent: Members of the model, and the bytes that each remembers; none where it remembers nothing.
        device: Where the model is.
    """

    def __init__(
        self,
        features: int,
        horizons: int,
        experts: int,
        latent: tuple[int, int] = (0, 0),
        device: torch.device | str = "cpu",
    ) -> None:
        self.count = 0
        fp32: dict[str, Any] = {"dtype": torch.float32}
        self.features = torch.zeros(LENGTH, features, device=device, **fp32)
        self._experts = torch.zeros(LENGTH, horizons, experts, **fp32)  # in scales from the blend's forecast
        self._weights = torch.zeros(LENGTH, horizons, experts, **fp32)  # logarithms
        self._came = torch.full((LENGTH, horizons), math.nan, **fp32)  # in scales from the blend's forecast
        self._jumps = torch.full((LENGTH, 2), math.nan, **fp32)  # along and length of a forecast of the weights
        self._latents = torch.zeros(LENGTH, *latent, dtype=torch.int8, device=device)

    def add(self, features: Tensor, experts: Tensor, weights: Tensor, latent: Tensor | None) -> int:
        """Writes a tick in place of the oldest; returns its number.

        Args:
            features: Its features.
            experts: (horizons, experts): simple forecasts, in scales from the blend of them.
            weights: (horizons, experts): what each counted.
            latent: What the model remembered before it, in 8 bits; None if nothing.
        """
        place = self.count % LENGTH
        self.features[place].copy_(features)
        self._experts[place].copy_(experts)
        self._weights[place].copy_(weights.clamp(min=1e-12).log())
        self._came[place] = self._jumps[place] = math.nan
        if latent is not None:
            self._latents[place].copy_(latent)
        self.count += 1
        return self.count - 1

    def resolve(self, tick: int, horizon: int, came: float) -> None:
        """Takes down what came of a tick's forecast, in scales from the blend's; of ticks overwritten, nothing."""
        if tick >= self.count - LENGTH:
            self._came[tick % LENGTH, horizon] = max(-LARGEST_TARGET, min(LARGEST_TARGET, came))

    def resolve_jump(self, tick: int, along: float, length: float) -> None:
        """Takes down what came of the weights after a tick, see `coefficients.Fit`."""
        if tick >= self.count - LENGTH:
            self._jumps[tick % LENGTH, 0], self._jumps[tick % LENGTH, 1] = along, length

    def drop(self, tick: int) -> None:
        """What came after this tick was undone: nothing can be learned from it."""
        if tick >= self.count - LENGTH:
            self._came[tick % LENGTH] = math.nan

    def known(self) -> int:
        """How many ticks there are to learn from."""
        return min(self.count, LENGTH)

    def draw(self, members: int, generator: torch.Generator, length: int = 1) -> Tensor:
        """Places of ticks, (members, BATCH), or of sequences of `length` neighbours, (members, BATCH, length).

        The newest are drawn more often: the run is there now. Places are drawn on the host and stay there.
        """
        room = self.known() - length + 1
        age = (torch.rand(members, BATCH, generator=generator).square() * room).long()
        last = self.count - 1 - age
        if length == 1:
            return last % LENGTH
        return (last[..., None] - torch.arange(length - 1, -1, -1)) % LENGTH

    def lesson(self, places: Tensor, noise: Tensor | None = None) -> Lesson:
        """What there is to learn at these places, as `draw` gives them, on the host."""
        last = places if places.dim() < 3 else places[..., -1]
        at_last = (self._experts[last], self._weights[last], self._came[last], self._jumps[last])
        return Lesson(places, torch.empty(0) if noise is None else noise, *at_last)

    def recalled(self, tick: int) -> Tensor:
        """What came of the ticks that are like this one, in scales from the blend's forecast: (horizons,).

        A mean of all that is known, each counting by how alike its features are, drawn to 0 where few are.
        """
        kept = slice(0, self.known())
        apart = (self.features[kept] - self.features[tick % LENGTH]).square().mean(1)
        came = self._came[kept].clone()  # the host writes on while it is sent
        if apart.is_cuda:
            came = came.pin_memory().to(apart.device, non_blocking=True)
        alike = torch.exp(apart / (-2 * ALIKE**2))[:, None] * torch.isfinite(came)
        return (alike * came.nan_to_num()).sum(0) / (alike.sum(0) + DOUBT)

    def latents(self, places: Tensor) -> Tensor:
        """What each member remembered before ticks of its own: (members, n) places to (members, n, bytes)."""
        members = torch.arange(len(places), device=places.device)[:, None]
        return self._latents[places, members]

    def latent_bytes(self) -> int:
        """Memory of the latent states."""
        return self._latents.nbytes

    def state(self) -> dict[str, Tree]:
        """Live tensors and plain values, for a checkpoint."""
        return {"count": self.count} | {name: getattr(self, name) for name in self._tensors()}

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned."""
        self.count = state["count"]
        for name in self._tensors():
            getattr(self, name).copy_(state[name])

    def _tensors(self) -> tuple[str, ...]:
        return ("features", "_experts", "_weights", "_came", "_jumps", "_latents")
