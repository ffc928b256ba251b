"""The kinds of learned models, how each learns, and how one is made."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from hybridtrainer.predict.features import NAMES
from hybridtrainer.predict.gates import HIDDEN, FeedForward, Model
from hybridtrainer.predict.rssm import RSSM, size_for

Kind = Literal["rssm", "mlp", "linear", "blend"]


class Training(NamedTuple):
    """How a kind of model learns.

    Attributes:
        rate: Its learning rate.
        every: Ticks between updates: what bounds the time it takes.
    """

    rate: float
    every: int


TRAINING: dict[str, Training] = {"linear": Training(5e-3, 1), "mlp": Training(5e-3, 1), "rssm": Training(3e-3, 8)}
MEMBERS = 3  # of an MLP's ensemble


def make_model(
    kind: Kind,
    ticks: tuple[int, ...],
    experts: int,
    generator: torch.Generator,
    device: torch.device | str,
    parameters: int,
) -> Model | None:
    """A model that has learned nothing; None for "blend", which has none.

    Args:
        kind: Which.
        ticks: How many ticks ahead each horizon is.
        experts: Simple forecasts for each.
        generator: Draws the first weights.
        device: Where it computes.
        parameters: Of the trained model, by which the size of "rssm" is chosen.
    """
    match kind:
        case "rssm":
            return RSSM(size_for(parameters), len(NAMES), ticks, experts, generator, device)
        case "mlp":
            return FeedForward(len(NAMES), len(ticks), experts, MEMBERS, HIDDEN, generator, device)
        case "linear":
            return FeedForward(len(NAMES), len(ticks), experts, 1, 0, generator, device)
        case _:
            return None
