"""Depth forecasts: a model of repeated blocks begins as a few of them, from which the deep one is foreseen.

While the model is short, the blocks beyond the first few let their input pass, and neither they nor their gradients
are computed. When it grows, each of them becomes a copy of one that was trained, with its optimizer state; buffers and
what is frozen stay. Nothing of the model's structure changes, so that checkpoints, parameter groups and schedulers
know nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridtrainer import ranks
from hybridtrainer.blocks import find_blocks
from hybridtrainer.config import DepthConfig, HybridTrainerConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.losses import tokens_in
from hybridtrainer.predict.depth_checks import all_learn, are_fresh, chained, has_attention
from hybridtrainer.predict.growth import growth_step
from hybridtrainer.predict.shortening import Shortening, shortenings_of

LEAST_BLOCKS = 2  # of a short model, where it has more: one is no stack
WORTH_BLOCKS = 4  # with fewer, "auto" does not begin short
LEAST_STEPS = 200  # of a run; a shorter one has no time to learn with the whole model
KNOWS_MORE = 0.05  # of the loss: by so much less the whole model has learned something that a short one has not


@runtime_checkable
class FetchesBlocks(Protocol):
    """An optimizer whose blocks are fetched in their order and live elsewhere meanwhile."""

    def compute_first(self, blocks: int) -> None:
        """From now on only so many are computed."""

    def settle(self) -> None:
        """Brings everything to where parameters and states say it is."""

    def forget(self) -> None:
        """Parameters or states were replaced there."""


class Depth:
    """The blocks of a model, of which only the first few are computed until it grows.

    Args:
        blocks: All of them; none for a model that does not grow.
        short: How many are computed at first.
        settings: When it grows, and in which order.
        warmup_steps: When it grows if nobody knows where the run ends.
        parameters: Of the whole model.
        optimizer: Of the model.
        begins: Whether it begins short, whole, or as is decided before the first step.
        left: What another trainer has left short, with some blocks trained and some not.

    Attributes:
        is_open: Whether something is to be decided before the first step.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module] = (),
        short: int = 0,
        settings: DepthConfig | None = None,
        warmup_steps: int = 0,
        parameters: int = 0,
        optimizer: Optimizer | None = None,
        *,
        begins: Literal["short", "whole", "open"] = "short",
        left: Shortening | None = None,
    ) -> None:
        self._left, self._may_open = left, begins == "open"
        self.is_open = self._may_open or left is not None
        self._blocks = tuple(blocks)
        self._short = short
        self._settings = settings or DepthConfig()
        self._warmup_steps, self._parameter_count = warmup_steps, parameters
        self._tokens = 0  # of the steps since the run began
        self._fetches = optimizer if isinstance(optimizer, FetchesBlocks) else None
        self._shortening = Shortening(self._blocks, short)
        if begins == "short" and blocks:
            self.be(short=True)

    @property
    def is_short(self) -> bool:
        """Whether it has not grown yet."""
        return self._shortening.is_short

    def decide(self, end: int | None, batches: Sequence[Any], probe: Callable[[], float]) -> str:
        """Before the first step, where it is open: begins short if nothing is lost by it. Returns the reason.

        Args:
            end: Where the clock will end, if somebody knows.
            batches: Of a step.
            probe: Measures the loss of the model as it is.

        Raises:
            ModelError: if another trainer has left the model short.
        """
        if self._left is not None:
            raise ModelError(
                f"The model is short: another trainer has trained {self._left.short} of its {len(self._left.blocks)} "
                "blocks and was to make the others from them.",
                "Go on with that trainer, load one of its checkpoints, or build the model anew.",
            )
        said = self._decision(end, batches, probe)
        self.is_open = False
        return said

    def _decision(self, end: int | None, batches: Sequence[Any], probe: Callable[[], float]) -> str:
        if end is None:
            return "no depth forecast: nobody knows where the run ends"
        if end < LEAST_STEPS:
            return f"no depth forecast: a run of {end} steps is too short to grow in"
        try:
            with chained(self._blocks) as is_chain:
                whole = probe()
            if not is_chain():
                return "no depth forecast: the blocks do not follow each other, each with the result of the one before"
            self.be(short=True)
            short = probe()
        except BaseException as error:
            self.be(short=False)
            if not isinstance(error, Exception):
                raise
            return f"no depth forecast: it could not be tried ({type(error).__name__}: {str(error)[:80]})"
        told = f"of {len(self._blocks)} blocks {self._short} have a loss of {short:.4g}, all have {whole:.4g}"
        if short - whole > KNOWS_MORE * abs(short) or not math.isfinite(short + whole):
            self.be(short=False)
            return f"no depth forecast: {told}, so that the others know something already"
        return f"the model begins short: {told}; it grows at step {self._grows_at(end, sum(map(tokens_in, batches)))}"

    def state(self) -> dict[str, Any]:
        """What a run needs to go on with: whether it has yet to grow, and the tokens it was trained with."""
        return {"short": self.is_short, "tokens": self._tokens}

    def restore(self, state: dict[str, Any]) -> None:
        """Puts back what `state` returned."""
        self._tokens = state["tokens"]
        self.be(short=state["short"])

    def reopen(self) -> None:
        """The run is before its first step again: what was decided for it does not hold."""
        if self._may_open:
            self.be(short=False)
            self.is_open = True

    @property
    def can_be_short(self) -> bool:
        """Whether there are blocks that can be left out."""
        return bool(self._blocks)

    def be(self, *, short: bool) -> None:
        """Makes the blocks those of a short model, or leaves them as they are without this."""
        if self._left is not None:
            _make_whole(self._left, self._fetches)
            self._left, self.is_open = None, self._may_open
        if self._fetches is not None and self._blocks:
            self._fetches.compute_first(self._short if short else len(self._blocks))
        self._shortening.be(short=short)

    @property
    def share(self) -> float:
        """Of the blocks, what is computed in a step."""
        return self._short / len(self._blocks) if self.is_short else 1.0

    def is_due(self, clock: int, end: int | None, batches: Sequence[Any]) -> bool:
        """After a step with these batches: whether it grows now; `end` is where the clock will end, if known."""
        self._shortening.is_trained = True
        if not self.is_short:
            return False
        self._tokens += sum(map(tokens_in, batches))
        return clock >= self._grows_at(end, self._tokens / clock)

    def _grows_at(self, end: int | None, tokens_per_step: float) -> int:
        if end is None:
            return self._warmup_steps
        if self._settings.until is not None:
            return math.ceil(self._settings.until * end)
        return growth_step(end, self._parameter_count, tokens_per_step)

    def new_states(self, optimizer: Optimizer) -> dict[Tensor, Any]:
        """The optimizer states that growth will add: made beforehand, since memory may not suffice for them."""
        pairs = [pair for pair in self._parameters(optimizer) if pair[0] not in optimizer.state]
        return {own: deepcopy(optimizer.state[trained]) for own, trained in pairs if trained in optimizer.state}

    @torch.no_grad()
    def grow(self, optimizer: Optimizer, new_states: dict[Tensor, Any]) -> str:
        """Makes the model deep, with the states that `new_states` has made. Returns what was done, for the log."""
        if self._fetches is not None:
            self._fetches.settle()
        for own, trained in self._parameters(optimizer):
            own.copy_(trained)
            for name, value in optimizer.state.get(trained, {}).items() if own in optimizer.state else ():
                # Those of a streamed model have their places in host memory.
                if isinstance(value, Tensor) and isinstance(optimizer.state[own].get(name), Tensor):
                    optimizer.state[own][name].copy_(value)
                else:
                    optimizer.state[own][name] = deepcopy(value)
        optimizer.state.update(new_states)
        if self._fetches is not None:
            self._fetches.forget()
        self.be(short=False)
        return f"grown from {self._short} to {len(self._blocks)} blocks, by {self._settings.order}"

    def sources(self, optimizer: Optimizer) -> dict[int, nn.Parameter]:
        """By `id` the parameters that growth would replace now, each with its source; none for a whole model."""
        return {id(own): trained for own, trained in self._parameters(optimizer)} if self.is_short else {}

    def foreseen(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor] | None:
        """The state of a short model with copies of the weights that growth would give it now; None for a whole one.

        Whoever loads the weights alone has all blocks computed.
        """
        sources = self.sources(optimizer)
        if not sources:
            return None
        return {
            name: sources[id(value)].detach().clone() if id(value) in sources else value.detach()
            for name, value in model.state_dict(keep_vars=True).items()
        }

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Parameters that are replaced, each with its source. Who froze one of them knows what it is to be."""
        learning = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for target, source in self._pairs():
            for pair in zip(target.parameters(), source.parameters(), strict=True):
                if all(id(parameter) in learning and parameter.requires_grad for parameter in pair):
                    yield pair

    def _pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Blocks that are replaced, each with the one that it becomes a copy of; no source has been replaced before."""
        count = len(self._blocks)
        for number in reversed(range(count)):
            source = number % self._short if self._settings.order == "stack" else number * self._short // count
            if source != number:
                yield self._blocks[number], self._blocks[source]


def make_depth(model: nn.Module, config: HybridTrainerConfig, optimizer: Optimizer | None = None) -> Depth:
    """What the configuration asks for; with "auto" one that is open, where the model has enough blocks to train.

    Raises:
        ModelError: if the model has no repeated blocks, or too few of them.
    """
    by_name, left = config.predict != "auto" and "depth" in config.predict, None
    for each in shortenings_of(model):  # of other trainers
        if each.is_short and each.is_trained and not by_name:
            left = each
        elif each.is_short:
            _make_whole(each, optimizer)
    if not by_name and (config.predict != "auto" or ranks.count() > 1):
        return Depth(optimizer=optimizer, left=left)
    try:
        blocks = find_blocks(model).modules
    except ModelError:
        if by_name:
            raise
        return Depth(optimizer=optimizer, left=left)
    short = max(min(LEAST_BLOCKS, len(blocks) - 1), round(config.depth.share * len(blocks)))
    if by_name and not 0 < short < len(blocks):
        raise ModelError(
            f"The model has {len(blocks)} blocks, and depth.share = {config.depth.share:g} of them are all.",
            "Choose a smaller share, or leave depth out of predict.",
        )
    begins: Literal["short", "whole", "open"] = "short"
    if not by_name:
        fits = WORTH_BLOCKS <= len(blocks) > short and all(map(has_attention, blocks)) and all_learn(blocks, optimizer)
        if not fits:
            return Depth(optimizer=optimizer, left=left)
        # A model that has been trained does not begin short, but a checkpoint may say that it is: hosts load weights
        # before the rest of the state.
        begins = "open" if left is None and are_fresh(blocks) else "whole"
    parameters = sum(each.numel() for each in model.parameters())
    return Depth(blocks, short, config.depth, config.warmup_steps, parameters, optimizer, begins=begins, left=left)


def _make_whole(left: Shortening, optimizer: object) -> None:
    left.be(short=False)
    if isinstance(optimizer, FetchesBlocks):
        optimizer.compute_first(len(left.blocks))
