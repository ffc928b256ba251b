"""A recurrent state-space model of the training dynamics, in the manner of DreamerV3 (arXiv 2301.04104), tiny.

A deterministic state h is carried on by a gated recurrent unit; a stochastic state z of categoricals says what h could
not foresee. From tick to tick:

    h' = GRU(z, h)          prior: z' ~ p(z | h')          posterior: z' ~ q(z | h', features)

The prior learns to foresee the posterior, so that the model can go on without features: the rollout. From the states
that a rollout reaches, the heads say how the simple forecasts for that horizon are to be weighted, and how far a jump
should go. All members of the
ensemble are computed side by side, with a first dimension of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrainer.kernels.rollout import Cell, by_class, gru, probabilities, rollout
from hybridtrainer.predict.gates import Correction, bounded, drawn, zeros
from hybridtrainer.predict.replay import Lesson, Replay
from hybridtrainer.tree import Tree

CLASSES = 8  # of each categorical
SEQUENCE = 6  # ticks that gradients flow through
FREE_NATS = 1.0  # up to which prior and posterior may differ at no cost
PRIOR_SHARE, POSTERIOR_SHARE = 1.0, 0.1  # by which each is drawn to the other
FEATURE_SHARE = 0.1  # of what the features cost that are not told right
CODE = 127  # h is between -1 and 1, z between 0 and 1: 8 bits are so many steps on either side


class Size(NamedTuple):
    """How large the model is.

    Attributes:
        deterministic: Numbers in h, a multiple of 16.
        categoricals: In z; times 8 classes a power of 2.
        members: Of the ensemble.
    """

    deterministic: int = 256
    categoricals: int = 32
    members: int = 3


def size_for(parameters: int) -> Size:
    """The size for a trained model of so many parameters: the forecast must cost little beside a step."""
    if parameters >= 50_000_000:
        return Size()
    return Size(128, 16, 2) if parameters >= 2_000_000 else Size(64, 8, 2)


class RSSM:
    """The model; see the module.

    Args:
        size: How large.
        features: How many.
        ticks: How many ticks ahead each head looks, in rising order.
        experts: Simple forecasts for each.
        generator: Draws the first weights.
        device: Where it computes.
    """

    def __init__(
        self,
        size: Size,
        features: int,
        ticks: tuple[int, ...],
        experts: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        d, z, members = size.deterministic, size.categoricals * CLASSES, size.members

        def layer(inputs: int, outputs: int) -> nn.Parameter:
            return drawn((members, inputs, outputs), inputs, generator, device)

        def nothing(*shape: int) -> nn.Parameter:
            return zeros(members, *shape, device=device)

        self.size, self._ticks = size, ticks
        self._weights = {
            "input": layer(z, 3 * d), "input_bias": nothing(1, 3 * d),
            "hidden": layer(d, 3 * d), "hidden_bias": nothing(1, 3 * d),
            "prior": layer(d, z), "prior_bias": nothing(1, z),
            "posterior": layer(d + features, z), "posterior_bias": nothing(1, z),
            "decoder": layer(d + z, features), "decoder_bias": nothing(1, features),
            # The heads begin at 0: nothing is corrected before something is learned.
            "head": nothing(len(ticks), d + z, experts + 1), "head_bias": nothing(len(ticks), 1, experts + 1),
            "gain": nothing(d + z, 1), "gain_bias": nothing(1, 1),
        }  # fmt: skip
        self._h = torch.zeros(members, 1, d, dtype=torch.float32, device=device)
        self._z = torch.zeros(members, 1, z, dtype=torch.float32, device=device)

    @torch.no_grad()
    def advance(self, features: Tensor) -> None:
        """One tick of the posterior, with the chances of the classes in place of draws from them."""
        self._h.copy_(gru(self._cell(), self._z, self._h))
        logits = self._posterior(self._h, features.expand(self.size.members, 1, -1))
        self._z.copy_(probabilities(logits, CLASSES))

    @torch.no_grad()
    def correction(self) -> Correction:
        """What the heads say at the end of their part of the rollout."""
        states = rollout(self._cell(), self._h[:, 0], self._z[:, 0], self._ticks[-1], CLASSES)
        reached = torch.stack([states[:, tick - 1] for tick in self._ticks], 1)[:, None]
        return bounded(self._heads(reached)[:, 0], self._gain(reached)[:, 0])

    def lesson(self, replay: Replay, generator: torch.Generator) -> Lesson:
        """Sequences that each member draws for itself, and the noise by which it draws classes in them."""
        places = replay.draw(self.size.members, generator, min(SEQUENCE, replay.known()))
        shape = (places.shape[-1], *places.shape[:-1], self.size.categoricals, CLASSES)
        return replay.lesson(places, torch.rand(shape, generator=generator))

    def loss(self, replay: Replay, lesson: Lesson) -> Tensor:
        """Prior and posterior, features told again, and what the heads say at the end of each sequence."""
        places = lesson.places
        h, z = self._decode(replay.latents(places[..., 0]))
        total = torch.zeros((), device=h.device)
        for place, noise in zip(places.unbind(-1), lesson.noise, strict=True):
            told = replay.features[place]
            h = gru(self._cell(), z, h)
            prior, posterior = self._prior(h), self._posterior(h, told)
            z = self._draw(posterior, noise)
            again = torch.baddbmm(self._weights["decoder_bias"], torch.cat([h, z], -1), self._weights["decoder"])
            total = total + self._apart(prior, posterior) + FEATURE_SHARE * F.mse_loss(again, told)
        reached = self._imagine(h, z)
        found = bounded(self._heads(reached), self._gain(reached))
        misfit = lesson.misfit(found.gates, found.scale).mean() + lesson.misjump(found.gain).mean()
        return total / places.shape[-1] + misfit

    def latent(self) -> Tensor | None:
        """h and z in steps of 1/127: (members, d + z), int8."""
        return (torch.cat([self._h[:, 0], self._z[:, 0]], -1) * CODE).round().to(torch.int8)

    def weights(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return self._weights

    def state(self) -> dict[str, Tree]:
        """The present belief."""
        return {"h": self._h, "z": self._z}

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned."""
        self._h.copy_(state["h"])
        self._z.copy_(state["z"])

    def _cell(self) -> Cell:
        names = ("input", "input_bias", "hidden", "hidden_bias", "prior", "prior_bias")
        return Cell(*(self._weights[name] for name in names))

    def _prior(self, h: Tensor) -> Tensor:
        return torch.baddbmm(self._weights["prior_bias"], h, self._weights["prior"])

    def _posterior(self, h: Tensor, features: Tensor) -> Tensor:
        seen = torch.cat([h, features / 4], -1)
        return torch.baddbmm(self._weights["posterior_bias"], seen, self._weights["posterior"])

    def _heads(self, states: Tensor) -> Tensor:
        """(members, n, horizons, d + z) to (members, n, horizons, experts + 1)."""
        out = torch.einsum("mnhd,mhde->mnhe", states, self._weights["head"])
        return out + self._weights["head_bias"].transpose(1, 2)

    def _gain(self, states: Tensor) -> Tensor:
        """(members, n, horizons, d + z) to (members, n), from the states about as far ahead as a jump goes."""
        ahead = states[:, :, len(self._ticks) // 2]
        return torch.baddbmm(self._weights["gain_bias"], ahead, self._weights["gain"])[..., 0]

    def _imagine(self, h: Tensor, z: Tensor) -> Tensor:
        """The states at the heads' ticks, with gradients: (members, n, horizons, d + z)."""
        reached = []
        for tick in range(1, self._ticks[-1] + 1):
            h = gru(self._cell(), z, h)
            z = probabilities(self._prior(h), CLASSES)
            if tick in self._ticks:
                reached.append(torch.cat([h, z], -1))
        return torch.stack(reached, 2)

    def _draw(self, logits: Tensor, noise: Tensor) -> Tensor:
        """One class of each categorical; gradients go to the probabilities as if these had been taken."""
        chances = by_class(probabilities(logits, CLASSES), CLASSES)
        noise = noise.clamp(1e-9, 1 - 1e-9)
        drawn_class = (chances.detach().log() - (-noise.log()).log()).argmax(-1)  # Gumbel's trick
        through: Tensor = (chances - chances.detach()).flatten(-2)
        classes = torch.arange(CLASSES, device=logits.device)
        return (drawn_class[..., None] == classes).float().flatten(-2) + through

    def _apart(self, prior: Tensor, posterior: Tensor) -> Tensor:
        """How far prior and posterior are apart, each drawn to the other by its share."""

        def divergence(one: Tensor, other: Tensor) -> Tensor:
            logs = [torch.log(probabilities(x, CLASSES)) for x in (one, other)]
            return (logs[0].exp() * (logs[0] - logs[1])).sum(-1).clamp(min=FREE_NATS).mean()

        pulled = divergence(posterior.detach(), prior)
        return PRIOR_SHARE * pulled + POSTERIOR_SHARE * divergence(posterior, prior.detach())

    def _decode(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `latent`, for (members, n, bytes)."""
        values, d = latents.float() / CODE, self.size.deterministic
        return values[..., :d], values[..., d:]
