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
OTHER_LENGTH = "no sample forecasts: loss_fn returns another number of losses than a batch has samples"
AHEAD = "no sample forecasts for now: batches were fetched that the step did not get, so nobody knows which it had"


class Gives(Protocol):
    """Who gives batches.

    Attributes:
        starts: How often somebody began to go through it, or put it somewhere.
    """

    starts: int

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
        self._told: set[str] = set()
        self._lost_at: int | None = None  # the start of the loader since which batches and steps do not agree
        self._said = (1, 0, 0)  # after how many passes to say something; what had passed and was taken at the last

    def begin(self, samples: int) -> None:
        """The data are known: takes up what was loaded, or goes on with what it has of as many samples."""
        if self._ledger is None or self._ledger.samples != samples:
            self._ledger, self._said = Ledger(samples), (1, 0, 0)
        if self._saved is not None:
            self.restore(self._saved)

    def expect(self, loader: Gives | None, batches: int) -> None:
        """A step begins, with so many batches; which samples they have is known if the loader has given as many."""
        self._indices, self._loss.heard = [], None
        if loader is None or self._ledger is None:
            return
        given = loader.given()
        if len(given) not in (0, batches):  # who fetches ahead has another batch in hand than the last one given
            self._lost_at = loader.starts
            self._tell(AHEAD)
        if len(given) == batches and self._lost_at != loader.starts:
            self._indices, self._loss.heard = given, []

    def learn(self) -> None:
        """The step was real: takes note of its losses."""
        heard, self._loss.heard = self._loss.heard, None
        if self._ledger is None or not heard:
            return
        if not all(loss.dim() for loss in heard):
            self._tell(NO_SAMPLES)
            return
        lengths, expected = [len(loss) for loss in heard], [len(indices) for indices in self._indices]
        if sum(lengths) != sum(expected) or (len(lengths) == len(expected) and lengths != expected):
            self._tell(OTHER_LENGTH)
            return
        self._ledger.learn(torch.cat(self._indices), torch.cat(heard))

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._say(text)
        self._told.add(text)

    def state(self) -> Tree:
        """Everything, as a tree of live tensors; None where there is no ledger."""
        if self._ledger is None:
            return self._saved
        return {"ledger": self._ledger.state(), "said": list(self._said)}

    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned; it waits where the data are not known yet."""
        self._saved = state
        if self._ledger is None:
            return
        if state is None:
            self._ledger, self._said = Ledger(self._ledger.samples), (1, 0, 0)
        elif len(state["ledger"]["losses"]) == self._ledger.samples:
            self._ledger.restore(state["ledger"])
            self._said, self._saved = tuple(state["said"]), None

    def chances(self, indices: Tensor, passed: int, taken: int) -> Tensor:
        """The chance of each sample to be computed, when so many have passed by and so many of them were taken."""
        assert self._ledger is not None
        times, before, taken_before = self._said
        if passed >= times * self._ledger.samples:
            share, passes = 1 - (taken - taken_before) / (passed - before), (passed - before) / self._ledger.samples
            self._said = (2 * times, passed, taken)
            self._say(f"sample forecasts: in {passes:.1f} passes over the data {share:.0%} was foreseen, not computed")
        return self._ledger.chances(indices)
