"""What travels: a block, or a parameter outside the blocks, with its optimizer state and its place in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.kernels.reference import Hyper
from hybridtrainer.memory.arena import Piece
from hybridtrainer.memory.layout import Entry, Layout, Target
from hybridtrainer.memory.portions import Portion, divide

PortionKey = tuple[int, int]
"""A unit's key, and the number of a portion of its states."""


@dataclass(frozen=True)
class Due:
    """An update that waits until the unit is fetched next.

    Attributes:
        scale: Factor of the gradients, on the device.
        hyper: Settings for each target, as they were when the step ended.
    """

    scale: Tensor
    hyper: tuple[Hyper, ...]


@dataclass
class Unit:
    """A block or a lone parameter.

    Attributes:
        key: Its number; blocks come first, in order.
        parameters: One for each entry of the layout.
        weights: Host bytes of the weights; nothing for a lone parameter, whose weights stay on the device.
        states: Host bytes of the optimizer states.
        gradients: Host bytes of parked gradients, where updates are deferred.
        steps: How often it was updated, a count that checkpoints hold.
        is_parked: Whether `gradients` holds something of this step.
        due: An update that was decided but not yet made.
        portions: How its states travel.
        trainable: The entries that are trained, with their parameters.
        targets: What updates change, each with one of its parameters, which all have the same settings.
    """

    key: int
    layout: Layout
    parameters: tuple[nn.Parameter, ...]
    weights: Piece
    states: Piece
    gradients: Piece
    steps: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    is_parked: bool = False
    due: Due | None = None
    portions: dict[PortionKey, Portion] = field(init=False)
    trainable: list[tuple[Entry, nn.Parameter]] = field(init=False)
    targets: list[tuple[Target, nn.Parameter]] = field(init=False)

    def __post_init__(self) -> None:
        self.portions = {(self.key, number): portion for number, portion in enumerate(divide(self.layout))}
        pairs = zip(self.layout.entries, self.parameters, strict=True)
        self.trainable = [(entry, parameter) for entry, parameter in pairs if entry.trainable]
        trained = [parameter for _, parameter in self.trainable]
        self.targets = [(target, trained[target.members[0][0]]) for target in self.layout.targets]

    def optimizer_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The live state of each trainable parameter, as an optimizer shows it."""
        return {
            parameter: {"step": self.steps, **entry.state_views(self.states.shown)}
            for entry, parameter in self.trainable
        }
