"""Changes of settings after which a resident step takes less memory, each with what it saves and what it costs.

Each is rehearsed without memory, with the user's own loss and a batch of the same shape. Time is told by operations:
what is computed again costs as much as the first time. Where a model cannot be rehearsed the changes have no figures.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adam, AdamW, Optimizer

from hybridtrainer.blocks import find_blocks
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.kernels.formats import bytes_per_parameter, weight_dtype
from hybridtrainer.losses import LossFunction, samples_in
from hybridtrainer.memory.recompute import recompute_blocks
from hybridtrainer.parts import divide
from hybridtrainer.planning.arithmetic import arithmetic
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.pieces import without_cache, without_memory
from hybridtrainer.planning.rehearsal import rehearse
from hybridtrainer.planning.resident import STATES, as_estimate, largest_keep
from hybridtrainer.predict.averages import NO_AVERAGES, Averages
from hybridtrainer.randomness import isolated_randomness
from hybridtrainer.real_step import UPDATE
from hybridtrainer.sizes import as_size
from hybridtrainer.state import Training

CHECKPOINTS = (4, 2, 1)
LEAST_SHARE = 0.01  # of a plan; less is within what an estimate may be wrong by
EVALUATION = "an evaluation"


@dataclass(frozen=True)
class Situation:
    """A step that did not fit.

    Attributes:
        training: Model and optimizer.
        loss_fn: The user's own.
        memory: The settings.
        accumulate: Micro-batches in a step.
        batch: What was computed at a time; None where that is not known.
        doing: Where it failed.
        averages: Of the weights, as the run keeps them.
    """

    training: Training
    loss_fn: LossFunction
    memory: MemoryConfig
    accumulate: int
    batch: Any
    doing: str
    averages: Averages = NO_AVERAGES


@dataclass(frozen=True)
class Edit:
    """A change of settings.

    Attributes:
        setting: As it is written in a configuration or in code.
        price: What it costs besides time.
        saved_bytes: Of the peak; None where that is not known.
        more_time: As a share; None where that is not known.
    """

    setting: str
    price: str
    saved_bytes: int | None = None
    more_time: float | None = None

    def __str__(self) -> str:
        saved = "" if self.saved_bytes is None else f"saves {as_size(self.saved_bytes)}, "
        time = "" if self.more_time is None else f"{self.more_time:+.0%} time, "
        return f"{self.setting}: {saved}{time}{self.price}"


OTHER_PROGRAMS = Edit("no other program on this GPU", "`nvidia-smi` shows them")


def is_worth_it(edit: Edit, now: Estimate | None) -> bool:
    """Whether a change saves a share of the plan that could make a difference; so it may where that is not known."""
    if now is None or edit.saved_bytes is None:
        return True
    in_question = now.gpu_bytes - now.gpu.get("workspace", 0)  # which no setting changes
    return edit.saved_bytes > 0 and edit.saved_bytes >= LEAST_SHARE * in_question


@dataclass(frozen=True)
class Rehearsed:
    """What a situation takes, and operations for each sample."""

    estimate: Estimate
    flops: float


def rehearse_situation(situation: Situation) -> Rehearsed | None:
    """What the step was expected to take; None where the model or its loss cannot be run without values."""
    if situation.batch is None:
        return None
    try:
        with isolated_randomness(seed=0):
            return _rehearse(situation)
    except Exception:  # whatever the user's code cannot do without values: there is no plan then
        return None


def ranked_edits(situation: Situation, now: Rehearsed | None) -> list[Edit]:
    """The changes that help, those that cost the least time first; those without figures come last.

    Args:
        situation: What did not fit.
        now: Its rehearsal, where there is one.
    """
    priced = [_priced(edit, changed, now) for edit, changed in _changes(situation)]
    estimate = now.estimate if now is not None else None
    found = [edit for edit in (*priced, *_others(situation)) if is_worth_it(edit, estimate)]
    return sorted(found, key=lambda edit: (edit.more_time is None, edit.more_time or 0.0, -(edit.saved_bytes or 0)))


def _rehearse(situation: Situation) -> Rehearsed:
    model = without_cache(without_memory(situation.training.model))
    recompute_blocks(model, situation.memory.checkpoint_every, largest_keep(situation.memory))
    batch, tensors = _without_values(situation.batch)

    def step() -> None:
        with arithmetic(situation.memory.precision):
            situation.loss_fn(model, batch).mean().backward()  # type: ignore[no-untyped-call]

    spent = rehearse(step, [*model.parameters(), *model.buffers(), *tensors])
    estimate = as_estimate(model, spent, _state_bytes(situation.training.optimizer), situation.averages)
    return Rehearsed(estimate, spent.flops / samples_in(situation.batch))


def _changes(situation: Situation) -> Iterator[tuple[Edit, Situation]]:
    """What makes the two passes smaller; `more_time` is None where time is not the price."""
    if situation.batch is None or situation.doing.startswith(UPDATE):
        return  # no activation is there at that moment
    memory, batch = situation.memory, situation.batch
    halves = divide(batch, 2) if samples_in(batch) > 1 else ""
    if not isinstance(halves, str):
        smaller = replace(situation, batch=halves[0])
        if not memory.retry_smaller:
            yield Edit("memory.retry_smaller = true", "the same samples in a step", more_time=0.0), smaller
        size, times = samples_in(halves[0]), 2 * situation.accumulate
        setting = f"train.batch_size = {size} with train.accumulate = {times}"
        normed = any(isinstance(module, _BatchNorm) for module in situation.training.model.modules())
        price = "the same samples in a step" + ("; batch norms see fewer at a time" if normed else "")
        yield Edit(setting, price, more_time=0.0), smaller
    if memory.precision == "fp32":
        changed = replace(situation, memory=memory.model_copy(update={"precision": "bf16"}))
        yield Edit('memory.precision = "bf16"', "products are rounded to 16 bits", more_time=0.0), changed
    for setting, price, update in _segments(memory, _blocks_in(situation.training.model)):
        changed = replace(situation, memory=memory.model_copy(update=update))
        yield Edit(setting, price, more_time=0.0), changed
    if isinstance(batch, Tensor) and not batch.is_floating_point() and batch.dim() == 2 and batch.shape[1] > 4:
        shorter = batch.shape[1] // 2
        changed = replace(situation, batch=batch[:, : shorter + 1])
        yield Edit(f"model.context = {shorter}", "less context to learn from"), changed


def _segments(memory: MemoryConfig, blocks: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Ways to compute more again of so many blocks: the setting, its price, and what it changes."""
    if memory.checkpoint_keep != "inputs" and blocks:
        yield 'memory.checkpoint_keep = "inputs"', "the same numbers", {"checkpoint_keep": "inputs"}
    for every in (each for each in CHECKPOINTS if each < blocks):  # all at once would be kept at once
        yield f"memory.checkpoint_every = {every}", "the same numbers", {"checkpoint_every": every}


def _others(situation: Situation) -> Iterator[Edit]:
    """What a rehearsal says nothing of."""
    trained = [each.nbytes for each in situation.training.model.parameters() if each.requires_grad]
    if situation.doing.startswith(UPDATE):
        saved = sum(trained) - max(trained)
        yield Edit("foreach=False for the optimizer", "one weight is updated at a time", saved_bytes=saved)
    optimizer = situation.training.optimizer
    if isinstance(optimizer, Adam | AdamW):
        states = _state_bytes(optimizer)
        states = STATES * sum(trained) if states is None else states
        kept = (bytes_per_parameter("full8") - weight_dtype("full8").itemsize) * _trained_elements(optimizer)
        yield Edit("memory.optimizer_bits = 8", "moments are rounded to 8 bits", saved_bytes=int(states - kept))
    if saved := situation.averages.device_bytes:
        yield Edit('readout = "last"', "no average of the weights is read out", saved_bytes=saved)
    if situation.doing == EVALUATION:
        yield Edit("smaller batches to evaluate on", "the same figures, up to rounding")
    if _blocks_in(situation.training.model):
        yield Edit('memory.mode = "split8"', "weights and states wait in host RAM; `hybridtrainer plan` tells the time")
    yield OTHER_PROGRAMS


def _priced(edit: Edit, changed: Situation, now: Rehearsed | None) -> Edit:
    """The change with its figures, as far as there are any."""
    after = None if now is None else rehearse_situation(changed)
    if now is None or after is None:
        return replace(edit, more_time=None)
    saved = now.estimate.gpu_bytes - after.estimate.gpu_bytes
    more = after.flops / now.flops - 1 if now.flops else 0.0
    return replace(edit, saved_bytes=saved, more_time=None if edit.more_time is None else more)


def _blocks_in(model: nn.Module) -> int:
    try:
        return len(find_blocks(model).modules)
    except ModelError:
        return 0


def _state_bytes(optimizer: Optimizer) -> int | None:
    """What the optimizer keeps; None before its first update, where that is not known from its kind."""
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    if not kept and isinstance(optimizer, SGD):
        moved = (each for group in optimizer.param_groups if group["momentum"] for each in group["params"])
        return sum(int(each.nbytes) for each in moved)
    return sum(value.nbytes for value in kept) if kept else None


def _trained_elements(optimizer: Optimizer) -> int:
    return sum(each.numel() for group in optimizer.param_groups for each in group["params"] if each.requires_grad)


def _without_values(batch: Any) -> tuple[Any, list[Tensor]]:
    """The batch on the meta device, and the tensors in it."""
    tensors: list[Tensor] = []

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(torch.empty_like(value, device="meta"))
            return tensors[-1]
        if isinstance(value, MutableMapping):
            other = copy.copy(value)
            other.update({key: moved(inner) for key, inner in value.items()})
            return other
        if isinstance(value, list | tuple):
            inner = [moved(each) for each in value]
            return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)
        return value

    return moved(batch), tensors
