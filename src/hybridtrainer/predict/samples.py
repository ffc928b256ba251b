"""Sample forecasts in a run: the ledger learns from real steps, and what the loader gives next depends on it.

They need one loss for each sample and a loader that says which samples a batch had. A step whose batch did not come
from there, or came in another way, teaches nothing and does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hybridtrainer.losses import CheckedLoss
from hybridtrainer.predict.ledger import Ledger
from hybridtrainer.tree import Tree

NO_SAMPLES = "no sample forecasts: loss_fn returns one loss for a whole batch, and they need one for each sample"


class Gives(Protocol):
    """Who gives batches."""

    def given(self) -> list[Tensor]:
        """Which samples each batch had that was given since this was last asked."""
        ...


class SampleForecasts:
    """Learns which samples a model knows.

    Args:
        loss: Whose losses of single samples are listened to.
        say: Told of what people should know.
    """

    def __init__(self, loss: CheckedLoss, say: Callable[[str], None]) -> None:
        self._loss = loss
        self._say = say
        self._ledger: Ledger | None = None
        self._saved: Tree = None
        self._indices: list[Tensor] = []
        self._told = False
        self._said = (1, 0, 0)  # after how many passes to say something; what had passed and was computed at the last

    def begin(self, samples: int) -> Callable[[Tensor, int], Tensor]:
        """Starts a ledger, or takes up one that was loaded. Returns what says the chances of samples."""
        self._ledger = Ledger(samples)
        if self._saved is not None:
            self.restore(self._saved)
        return self._chances

    def expect(self, loader: Gives | None, batches: int) -> None:
        """A step begins, with so many batches; which samples they have is known if the loader has given as many."""
        given = loader.given() if loader is not None else []
        self._indices = given if len(given) == batches else []
        self._loss.heard = [] if self._indices and self._ledger is not None else None

    def learn(self) -> None:
        """The step was real: takes note of its losses."""
        heard, self._loss.heard = self._loss.heard, None
        if self._ledger is None or not heard:
            return
        if not all(loss.dim() for loss in heard):
            if not self._told:
                self._say(NO_SAMPLES)
            self._told = True
            return
        losses, indices = torch.cat(heard), torch.cat(self._indices)
        if len(losses) == len(indices):
            self._ledger.learn(indices, losses)

    def state(self) -> Tree:
        """Everything, as a tree of live tensors; None where there is no ledger."""
        if self._ledger is None:
            return self._saved
        return {"ledger": self._ledger.state(), "said": list(self._said)}

    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned; it waits where the data are not known yet."""
        self._saved = state
        if self._ledger is not None and state is not None:
            self._ledger.restore(state["ledger"])
            self._said, self._saved = tuple(state["said"]), None

    def _chances(self, indices: Tensor, passed: int) -> Tensor:
        ledger = self._ledger
        assert ledger is not None
        found = ledger.chances(indices)  # no sooner is it known how much was computed
        next_time, before, computed_before = self._said
        if passed >= next_time * ledger.samples:
            share = 1 - (ledger.computed - computed_before) / (passed - before)
            self._said = (2 * next_time, passed, ledger.computed)
            passes = (passed - before) / ledger.samples
            self._say(f"sample forecasts: in {passes:.1f} passes over the data {share:.0%} was foreseen, not computed")
        return found
