"""Sample forecasts in a run: the ledger learns from real steps, and what the loader gives next depends on it.

They need one loss for each sample and a loader that says which samples a batch had. A step whose batch did not come
from there, or came in another way, teaches nothing and does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hybridtrainer.data.loader import Given
from hybridtrainer.losses import CheckedLoss
from hybridtrainer.predict.ledger import LEAST_KNOWN, Ledger
from hybridtrainer.sample_weights import StepWeights
from hybridtrainer.tree import Tree

NO_SAMPLES = "no sample forecasts: loss_fn returns one loss for a whole batch, and they need one for each sample"
OTHER_LENGTH = "no sample forecasts: loss_fn returns another number of losses than a batch has samples"
AHEAD = "no sample forecasts for now: batches were fetched that the step did not get, so nobody knows which it had"
NO_LOADER = "no sample weights: the batches come from no loader that leaves samples out"
NOR_WEIGHTS = "; nor are they weighed"


class Gives(Protocol):
    """Who gives batches.

    Attributes:
        starts: How often somebody began to go through it, or put it somewhere.
    """

    starts: int

    def given(self) -> list[Given]:
        """Which samples each batch had that was given since this was last asked."""
        ...


class SampleForecasts:
    """Learns which samples a model knows.

    Args:
        loss: Whose losses of single samples are listened to.
        say: Told of what people should know.
        waits: Whether every sample is computed until enough of them are known; that is looked at after every pass.
        weighs: Whether a sample counts the more the smaller the chance was with which it was taken.
    """

    def __init__(
        self, loss: CheckedLoss, say: Callable[[str], None], waits: bool = False, weighs: bool = False
    ) -> None:
        self._loss = loss
        self._say = say
        self._weighs = weighs
        self._waits, self._waits_first = waits, waits
        self._looked_at = 0  # after how many passes it was last seen how many are known
        self._ledger: Ledger | None = None
        self._saved: Tree = None
        self._indices: list[Tensor] = []
        self._told: set[str] = set()
        self._lost_at: int | None = None  # the start of the loader since which batches and steps do not agree
        self._said = (1, 0, 0)  # after how many passes to say something; what had passed and was taken at the last

    def begin(self, samples: int) -> None:
        """The data are known: takes up what was loaded, or goes on with what it has of as many samples."""
        if self._ledger is None or self._ledger.samples != samples:
            self._begin_anew(samples)
        if self._saved is not None:
            self.restore(self._saved)

    def expect(self, loader: Gives | None, batches: int) -> None:
        """A step begins, with so many batches; which samples they have is known if the loader has given as many."""
        self._indices, self._loss.heard, self._loss.weights = [], None, None
        if loader is None or self._ledger is None:
            if self._weighs:
                self._tell(NO_LOADER)
            return
        given = loader.given()
        if len(given) not in (0, batches):  # who fetches ahead has another batch in hand than the last one given
            self._lost_at = loader.starts
            self._tell(AHEAD + self._nor_weights)
        if len(given) == batches and self._lost_at != loader.starts:
            self._indices, self._loss.heard = [batch.indices for batch in given], []
            weights = [batch.weights for batch in given if batch.weights is not None]
            self._loss.weights = StepWeights(weights) if weights else None

    def learn(self) -> None:
        """The step was real: takes note of its losses."""
        heard, self._loss.heard, self._loss.weights = self._loss.heard, None, None
        if self._ledger is None or not heard:
            return
        if not all(loss.dim() for loss in heard):
            self._tell(NO_SAMPLES + self._nor_weights)
            return
        lengths, expected = [loss.numel() for loss in heard], [indices.numel() for indices in self._indices]
        if sum(lengths) != sum(expected) or (len(lengths) == len(expected) and lengths != expected):
            self._tell(OTHER_LENGTH + self._nor_weights)
            return
        indices = self._indices[0] if len(self._indices) == 1 else torch.cat(self._indices)
        self._ledger.learn(indices, torch.cat(heard))  # a copy, even of one: whoever returned it may use it again

    @property
    def _nor_weights(self) -> str:
        return NOR_WEIGHTS if self._weighs else ""

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._say(text)
        self._told.add(text)

    def state(self) -> Tree:
        """Everything, as a tree of live tensors; None where there is no ledger."""
        if self._ledger is None:
            return self._saved
        told = {"said": list(self._said), "waits": self._waits, "looked_at": self._looked_at}
        return {"ledger": self._ledger.state(), **told}

    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned; it waits where the data are not known yet."""
        self._saved = state
        if self._ledger is None:
            return
        if state is None:
            self._begin_anew(self._ledger.samples)
        elif len(state["ledger"]["losses"]) == self._ledger.samples:
            self._ledger.restore(state["ledger"])
            self._said, self._saved = tuple(state["said"]), None
            self._waits, self._looked_at = state["waits"], state["looked_at"]

    def _begin_anew(self, samples: int) -> None:
        self._ledger, self._said = Ledger(samples), (1, 0, 0)
        self._waits, self._looked_at = self._waits_first, 0

    def chances(self, indices: Tensor, passed: int, taken: int) -> Tensor | None:
        """The chance of each sample to be computed, when so many have passed by and so many of them were taken.

        None while all of them are.
        """
        assert self._ledger is not None
        if self._waits_first:
            self._look(passed, taken)
        if self._waits:
            return None
        times, before, taken_before = self._said
        if passed >= times * self._ledger.samples:
            share, passes = 1 - (taken - taken_before) / (passed - before), (passed - before) / self._ledger.samples
            self._said = (2 * times, passed, taken)
            self._say(f"sample forecasts: in {passes:.1f} passes over the data {share:.0%} was foreseen, not computed")
        return self._ledger.chances(indices)

    def _look(self, passed: int, taken: int) -> None:
        """Once in every pass over the data: whether enough is known to leave some of it out."""
        assert self._ledger is not None
        passes = passed // self._ledger.samples
        if passes <= self._looked_at:
            return
        self._looked_at = passes
        known = self._ledger.known_share()
        if self._waits != (known < LEAST_KNOWN):
            self._waits, self._said = not self._waits, (2 * passes, passed, taken)
            then = "every sample is computed again" if self._waits else "what is known is seldom computed from now on"
            self._say(f"sample forecasts: {known:.0%} of the samples are known, {then}")
