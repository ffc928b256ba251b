"""Averaged read-out: recent weights averaged for evaluation and for the end, beside the weights that are trained.

At a high learning rate the weights circle around a valley; their average lies in it. The average decides nothing in
training: a run with it has the same weights, bit for bit, as one without. How long a window to average over depends on
the run: `ChosenReadout` has two, and reads out whatever has the lowest loss on held-out batches: a place on the line
through both, or the last weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.predict.averages import DECAYS, averaged_buffers, averaged_parameters, averages_here, told_place
from hybridtrainer.predict.host_average import HostAverage
from hybridtrainer.predict.line import PLACES, lowest_place
from hybridtrainer.predict.probe import compare
from hybridtrainer.replicas import is_shard, local, part_of
from hybridtrainer.state import Training
from hybridtrainer.tree import Tree

STRIDES = (4, 16)  # steps from one taken in to the next: a dozen of a window say as much as all, for less work
LIKELY = 0.8  # chance of being better, from which on another choice is read out

Losses = list[list[float]]
"""Of each batch, one or one for each sample."""


class LastReadout:
    """The weights as they are."""

    copies = 0
    choosing_seconds = 0.0

    def observe(self) -> None:
        """Nothing."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Nothing is swapped."""
        yield

    def state(self) -> Tree:
        """There is none."""
        return None

    def restore(self, state: Tree) -> None:
        """There is nothing to put back."""


class AveragedReadout:
    """A running average of parameters and floating-point buffers, the statistics of batch norms included.

    Args:
        model: Whose weights to average; the average starts with the first ones it observes.
        decay: What the average keeps of itself at each step. It starts as a plain mean, so that the first weights do
            not count for more than the others.

    Attributes:
        copies: How often all weights were copied, for the average or to be put back.
    """

    choosing_seconds = 0.0

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.copies = 0
        self._model = model
        self._decay = decay
        self._parameters = averaged_parameters(model)
        self._buffers = _names_of(model, averaged_buffers(model))
        self._average: list[Tensor] = []
        self._observed = 0
        self._is_open = False

    @torch.no_grad()
    def observe(self) -> None:
        """Takes in the present weights."""
        live = self._live()
        if not self._observed:
            self._average = [tensor.clone() for tensor in live]
            self.copies += 1
        else:
            share = max(1 - self._decay, 1 / (self._observed + 1))
            for number in range(len(self._parameters), len(live)):
                if self._average[number].shape != live[number].shape:  # somebody has put another in its place
                    self._average[number] = live[number].clone()
            torch._foreach_lerp_(self._average, live, share)
        self._observed += 1

    @contextmanager
    def in_place(self, other: AveragedReadout | None = None, place: float = 0.0) -> Iterator[None]:
        """While open the model has the averaged weights; afterwards its own again, bit for bit.

        Args:
            other: A longer average of the same model.
            place: On the line through both; 0 is here and -1 there. Statistics, of which some may not be negative, are
                those of here where it lies beyond.
        """
        if not self._observed or self._is_open:
            yield
            return
        with torch.no_grad():
            live = self._live()
            own, self._is_open = [tensor.clone() for tensor in live], True
            self.copies += 1
        try:
            with torch.no_grad():
                self._write(live, other, place)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, own)
            self._is_open = False

    def _write(self, live: list[Tensor], other: AveragedReadout | None, place: float) -> None:
        longer = self._average if other is None else other._average
        for number, (own, short, long) in enumerate(zip(live, self._average, longer, strict=True)):
            share = -place if number < len(self._parameters) else max(0.0, -place)
            if own.shape == short.shape == long.shape:  # a buffer may have been replaced since
                own.copy_(short).lerp_(long, share) if share else own.copy_(short)

    @property
    def has_observed(self) -> bool:
        """Whether there is an average."""
        return self._observed > 0

    def state(self) -> Tree:
        """Everything, as a tree of live tensors; which of them are parts of sharded weights, where some are."""
        shards = [number for number, tensor in enumerate(self._averaged()) if is_shard(tensor)]
        return {"observed": self._observed, "average": self._average, **({"shards": shards} if shards else {})}

    @torch.no_grad()
    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned."""
        self._observed = state["observed"]
        pairs = zip(state["average"], self._averaged(), strict=False)  # nothing is averaged before the first step
        self._average = [part_of(saved, live).to(live.device, copy=True) for saved, live in pairs]

    def _live(self) -> list[Tensor]:
        return [local(tensor) for tensor in self._averaged()]

    def _averaged(self) -> list[Tensor]:
        return [*self._parameters, *map(self._model.get_buffer, self._buffers)]


class ChosenReadout:
    """Averages over a short and a long window; what is read out is between them, beyond, or the weights as they are.

    Args:
        model: Whose weights to average.
        probe: Losses of the model as it is, on batches that it is not trained on.
        say: Told when it goes from the last weights to averages or back.

    Attributes:
        choosing_seconds: What the last choice took.
    """

    def __init__(self, model: nn.Module, probe: Callable[[], Losses], say: Callable[[str], None]) -> None:
        self._model = model
        self._averages = self._new_averages()
        self._probe = probe
        self._say = say
        self._place: float | None = None  # on the line; None where the last weights are read out
        self._before: float | None = None  # the same, until it was chosen after the step that is counted here
        self._chosen_at = self._steps = 0
        self._is_open = False
        self.choosing_seconds = 0.0

    def _new_averages(self) -> list[AveragedReadout]:
        return [AveragedReadout(self._model, decay**stride) for decay, stride in zip(DECAYS, STRIDES, strict=True)]

    @property
    def copies(self) -> int:
        """How often all weights were copied."""
        return sum(average.copies for average in self._averages)

    def observe(self) -> None:
        """Takes in the present weights, each average in strides of its own."""
        for average, stride in zip(self._averages, STRIDES, strict=True):
            if not self._steps % stride:
                average.observe()
        self._steps += 1

    def choose(self) -> None:
        """Decides what is read out: a place on the line, or the last weights.

        Along the line it goes half of the way to where the parabola is lowest, and to what was measured to be likely
        better than that; and from the line to the last weights, or back, where that is likely better. Who asks again
        after the same step is told the same.
        """
        began = time.perf_counter()
        if self._chosen_at != self._steps:
            self._chosen_at, self._before = self._steps, self._place
        found = {place: self._probe_at(place) for place in PLACES}
        lowest = lowest_place([_mean_of(losses) for losses in found.values()])
        place = lowest if self._before is None else (self._before + lowest) / 2
        if place not in found:
            found[place] = self._probe_at(place)
        best = min(found, key=lambda each: _or_inf(_mean_of(found[each])))
        if _is_better(found[best], found[place]):
            place = best
        last, there = self._probe(), found[place]
        to_line = _is_better(there, last) if self._before is None else not _is_better(last, there)
        if to_line is (self._place is None):
            what, held_out = (told_place(place), there) if to_line else ("the last weights", last)
            instead = _mean_of(last if to_line else there)
            self._say(f"read-out: {what}, held-out loss {_mean_of(held_out):.4g} instead of {instead:.4g}")
        self._place = place if to_line else None
        self.choosing_seconds = time.perf_counter() - began

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open the model has the weights that are best on held-out batches; afterwards its own again."""
        if self._is_open or not self._averages[0].has_observed:
            yield
            return
        self._is_open = True
        try:
            self.choose()
            with nullcontext() if self._place is None else self._at(self._place):
                yield
        finally:
            self._is_open = False

    def _probe_at(self, place: float) -> Losses:
        with self._at(place):
            return self._probe()

    def _at(self, place: float) -> AbstractContextManager[None]:
        """While open the model has the weights of a place on the line; statistics are never taken beyond it."""
        short, long = self._averages
        return short.in_place(long, place)

    def state(self) -> Tree:
        """Everything, as a tree of live tensors."""
        chosen = {"place": self._place, "before": self._before, "chosen_at": self._chosen_at, "steps": self._steps}
        return {**chosen, "averages": [average.state() for average in self._averages]}

    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned; where another kind of read-out was kept, it begins anew."""
        kept = state if isinstance(state, dict) and "averages" in state else {}
        self._place, self._before = kept.get("place"), kept.get("before")
        self._chosen_at, self._steps = kept.get("chosen_at", 0), kept.get("steps", 0)
        self._averages = self._new_averages()
        for average, saved in zip(self._averages, kept.get("averages", ()), strict=False):
            average.restore(saved)


def _names_of(model: nn.Module, buffers: Sequence[Tensor]) -> list[str]:
    """By name, since a model may replace a buffer."""
    meant = set(map(id, buffers))
    return [name for name, buffer in model.named_buffers() if id(buffer) in meant]


def _mean_of(losses: Losses) -> float:
    return compare(losses, losses).after


def _or_inf(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _is_better(losses: Losses, others: Losses) -> bool:
    """Whether these are likely lower than the others, or numbers where those are none."""
    verdict = compare(others, losses)
    return verdict.chance_better >= LIKELY or (math.isfinite(verdict.after) and not math.isfinite(verdict.before))


Readout = LastReadout | AveragedReadout | ChosenReadout | HostAverage


def make_readout(
    training: Training, config: HybridTrainerConfig, probe: Callable[[], Losses] | None, say: Callable[[str], None]
) -> Readout:
    """The read-out that the configuration asks for; "auto" chooses where `predict` is "auto" and there is room.

    Args:
        training: Model and optimizer.
        config: The settings.
        probe: Losses of the model on held-out batches; None where there are none.
        say: Told of what people should know.
    """
    kept = averages_here(training, config, has_probes=probe is not None)
    if not kept.copies:
        return LastReadout()
    if kept.host_bytes:
        return HostAverage(training, config.readout_decay, kept.host_bytes)
    if kept.copies == 1:
        return AveragedReadout(training.model, config.readout_decay)
    assert probe is not None
    return ChosenReadout(training.model, probe, say)
