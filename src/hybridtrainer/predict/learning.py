"""A model of the dynamics at work: told of a tick, taught now and then, heard. On a GPU each of these is one launch.

What was decided by chance was drawn on the host before, so that the same seed gives the same run everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridtrainer.predict.begun import on_its_way
from hybridtrainer.predict.gates import Correction, Model
from hybridtrainer.predict.learners import Training
from hybridtrainer.predict.replay import Lesson, Replay
from hybridtrainer.predict.steady import Mailbox, Repeated
from hybridtrainer.tree import Tree

LEAST_TICKS = 24  # before a model learns
LONGEST_GRADIENT = 1.0
WEIGHT_DECAY = 0.01

Arrives = Callable[[], tuple[Tensor, ...]]


class Learner:
    """A model, its optimizer and what it learns from.

    Args:
        model: The model.
        training: How it learns.
        replay: The ticks that it learns from.
        generator: Draws them.
        device: Where the model is.
    """

    def __init__(
        self, model: Model, training: Training, replay: Replay, generator: torch.Generator, device: torch.device | str
    ) -> None:
        self.model, self.replay = model, replay
        self._every = training.every
        self._generator = generator
        self._captures = torch.device(device).type == "cuda"
        self._optimizer = torch.optim.AdamW(
            list(model.weights().values()), lr=training.rate, weight_decay=WEIGHT_DECAY, capturable=self._captures
        )
        self._mailbox = Mailbox(device)
        self._lesson: Lesson | None = None
        self._features = torch.zeros_like(replay.features[0])
        self._before = model.latent()
        self._shapes = [part.shape for part in model.correction()]
        self._said = torch.zeros(sum(shape.numel() for shape in self._shapes), device=device)
        self._repeated = [Repeated(work, device) for work in (self._advance, self._update, self._speak)]

    def take(self, features: Tensor, experts: Tensor, weights: Tensor) -> tuple[int, Arrives]:
        """Takes in a tick and learns where that is due; its number, and what waits for the model's `Correction`.

        Args:
            features: Of the tick, on the device.
            experts: (horizons, experts): simple forecasts, in scales from the blend of them.
            weights: (horizons, experts): what each counted.
        """
        advance, update, speak = self._repeated
        self._features.copy_(features)
        advance()
        tick = self.replay.add(self._features, experts, weights, self._before)
        if tick >= LEAST_TICKS and tick % self._every == 0:
            self._send(self.model.lesson(self.replay, self._generator))
            update()
        speak()
        arrived = on_its_way([self._said])
        return tick, lambda: self._parts(arrived()[0])

    def _advance(self) -> None:
        before = self.model.latent()
        if before is not None and self._before is not None:
            self._before.copy_(before)
        self.model.advance(self._features)

    def _send(self, drawn: Lesson) -> None:
        sent = Lesson(*self._mailbox.put(drawn))
        if self._lesson is None or any(one is not other for one, other in zip(self._lesson, sent, strict=True)):
            self._lesson = sent
            self._repeated[1].forget()

    def _update(self) -> None:
        assert self._lesson is not None
        with torch.enable_grad():
            loss = self.model.loss(self.replay, self._lesson)
        weights = list(self.model.weights().values())
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
            weight.grad = gradient
        torch.nn.utils.clip_grad_norm_(weights, LONGEST_GRADIENT)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _speak(self) -> None:
        torch.cat([part.flatten() for part in self.model.correction()], out=self._said)

    def _parts(self, said: Tensor) -> Correction:
        pieces = torch.split_with_sizes(said, [shape.numel() for shape in self._shapes])
        return Correction(*(piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)))

    def state(self) -> dict[str, Tree]:
        """Everything that decides what it says later, as a tree of live tensors and plain values."""
        return {
            "weights": {name: weight.detach() for name, weight in self.model.weights().items()},
            "belief": self.model.state(),
            "replay": self.replay.state(),
            "optimizer": self._optimizer.state_dict(),
        }

    def restore(self, state: Tree) -> None:
        """Goes back to what `state` returned, to the bit; it may have been on another device."""
        for name, weight in self.model.weights().items():
            weight.data.copy_(state["weights"][name])
        self.model.restore(state["belief"])
        self.replay.restore(state["replay"])
        groups = [group | {"capturable": self._captures} for group in state["optimizer"]["param_groups"]]
        self._optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        for repeated in self._repeated:
            repeated.forget()
