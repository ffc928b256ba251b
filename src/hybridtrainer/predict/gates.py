"""What a learned model of the dynamics is to the rest: something that shifts weights between simple forecasts.

A correction is one number for each simple forecast, added to the logarithm of its weight, and one more for the
logarithm of the error's scale. So a model that has learned nothing changes nothing, and one that has learned nonsense
still says something that some simple forecast says. Besides, it says how far the next jump should go of what its
coefficients say. The two models here look at the newest features alone; the one that remembers is in `rssm.py`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hybridtrainer.predict.replay import Lesson, Replay
from hybridtrainer.tree import Tree

LARGEST = 4.0  # that a correction can be, up or down
LARGEST_GAIN = 1.0  # the same, of a jump's length: by a factor of e
HIDDEN = 64


class Correction(NamedTuple):
    """What the members of a model say, each (members, horizons, ...).

    Attributes:
        gates: Added to the logarithms of the simple forecasts' weights.
        scale: Added to the logarithm of the error's scale.
        gain: (members,): added to the logarithm of a jump's length.
    """

    gates: Tensor
    scale: Tensor
    gain: Tensor


class Model(Protocol):
    """A learned model of the training dynamics, told of one tick after another."""

    def advance(self, features: Tensor) -> None:
        """Takes in the features of a tick."""
        ...

    def correction(self) -> Correction:
        """What it says of the newest tick."""
        ...

    def lesson(self, replay: Replay, generator: torch.Generator) -> Lesson:
        """What to learn from next: ticks, and whatever else is left to chance, as the generator draws them."""
        ...

    def loss(self, replay: Replay, lesson: Lesson) -> Tensor:
        """What training makes smaller; the lesson is on the model's device."""
        ...

    def latent(self) -> Tensor | None:
        """What it remembers in 8 bits, (members, bytes), for the replay; None if it remembers nothing."""
        ...

    def weights(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        ...

    def state(self) -> dict[str, Tree]:
        """What it remembers besides the weights, for a checkpoint."""
        ...

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned."""
        ...


class FeedForward:
    """A linear map of the features, or one with a hidden layer.

    Args:
        features: How many.
        horizons: How many.
        experts: How many simple forecasts.
        members: Models that learn from draws of their own.
        hidden: Numbers in the hidden layer; 0 for none.
        generator: Draws the first weights.
        device: Where it computes.
    """

    def __init__(
        self,
        features: int,
        horizons: int,
        experts: int,
        members: int,
        hidden: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shape = (members, horizons, experts + 1)
        self._first = drawn((members, features, hidden), features, generator, device) if hidden else None
        # The last layer begins at 0: nothing is corrected before something is learned.
        self._last = zeros(members, hidden or features, horizons * (experts + 1), device=device)
        self._bias = zeros(members, 1, horizons * (experts + 1), device=device)
        self._gain = zeros(members, hidden or features, 1, device=device)
        self._gain_bias = zeros(members, 1, 1, device=device)
        self._features = torch.zeros(features, dtype=torch.float32, device=device)

    def advance(self, features: Tensor) -> None:
        """Takes in the features of a tick."""
        self._features.copy_(features)

    @torch.no_grad()
    def correction(self) -> Correction:
        """What it says of the newest tick."""
        members = self._shape[0]
        out, gain = self._apply(self._features.expand(members, 1, -1))
        return bounded(out[:, 0], gain[:, 0])

    def lesson(self, replay: Replay, generator: torch.Generator) -> Lesson:
        """Ticks that each member draws for itself."""
        return replay.lesson(replay.draw(self._shape[0], generator))

    def loss(self, replay: Replay, lesson: Lesson) -> Tensor:
        """Mean over the ticks."""
        found = bounded(*self._apply(replay.features[lesson.places]))
        return lesson.misfit(found.gates, found.scale).mean() + lesson.misjump(found.gain).mean()

    def latent(self) -> Tensor | None:
        """It remembers nothing."""
        return None

    def weights(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        first = {} if self._first is None else {"first": self._first}
        gain = {"gain": self._gain, "gain_bias": self._gain_bias}
        return first | {"last": self._last, "bias": self._bias} | gain

    def state(self) -> dict[str, Tree]:
        """The newest features."""
        return {"features": self._features}

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned."""
        self._features.copy_(state["features"])

    def _apply(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(members, ticks, features) to (members, ticks, horizons, experts + 1) and (members, ticks)."""
        hidden = features / 4 if self._first is None else torch.tanh(features / 4 @ self._first)
        out = torch.baddbmm(self._bias, hidden, self._last)
        gain = torch.baddbmm(self._gain_bias, hidden, self._gain)[..., 0]
        return out.view(*out.shape[:2], *self._shape[1:]), gain


def bounded(out: Tensor, gain: Tensor) -> Correction:
    """The correction that a model's last layers stand for."""
    limited = LARGEST * torch.tanh(out / LARGEST)
    return Correction(limited[..., :-1], limited[..., -1], LARGEST_GAIN * torch.tanh(gain / LARGEST_GAIN))


def drawn(shape: tuple[int, ...], inputs: int, generator: torch.Generator, device: torch.device | str) -> nn.Parameter:
    """Weights of a layer with so many inputs, drawn on the CPU so that every device has the same."""
    return nn.Parameter((torch.randn(shape, generator=generator, dtype=torch.float32) / inputs**0.5).to(device))


def zeros(*shape: int, device: torch.device | str) -> nn.Parameter:
    """Weights that begin at 0."""
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))
