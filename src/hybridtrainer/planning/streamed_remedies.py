"""Changes of settings after which a streamed step takes less of the GPU, each with what it saves and what it costs.

Each is planned as `hybridtrainer plan` plans it, with a batch of the same shape and head and loss in tiles; time is
told where the speeds of the GPU are known. Blocks that the engine would give up by itself do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.blocks import find_blocks
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.post_mortem import ONE_AT_A_TIME, OUTSIDE_THE_BLOCKS, Place
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.planning.pieces import rehearse_pieces, without_memory
from hybridtrainer.planning.remedies import OTHER_PROGRAMS, Edit, is_worth_it
from hybridtrainer.planning.speeds import speeds_at_hand
from hybridtrainer.planning.streamed import estimate_streamed
from hybridtrainer.randomness import isolated_randomness

NEXT_MODES = {
    "fp32": ("split8", "moments are rounded to 8 bits, and the run begins anew"),
    "split8": ("sr8", "weights are rounded to 16 bits at random, and the run begins anew"),
    "sr8": ("sr4", "moments are rounded to 4 bits, and the run begins anew"),
    "sr4": ("factored", "no first moment, and the run begins anew"),
}


@dataclass(frozen=True)
class StreamedSituation:
    """A streamed step that did not fit.

    Attributes:
        model: Without memory and as it was before it was streamed; None where it cannot be had so.
        memory: The settings, with the division that was tried last.
        samples: Sequences in a micro-batch; 0 where that is not known.
        context: Tokens in one of them.
        accumulate: Micro-batches in a step.
        place: Where it failed, as far as that is known.
        hardware: Speeds of the GPU, where they are known.
    """

    model: nn.Module | None
    memory: MemoryConfig
    samples: int
    context: int
    accumulate: int
    place: Place | None
    hardware: Hardware | None = None


def streamed_situation(
    model: nn.Module, optimizer: StreamedOptimizer, precision: str, accumulate: int, batch: Any, place: Place | None
) -> StreamedSituation:
    """What there is to plan with after an error of GPU memory.

    Args:
        model: Streamed.
        optimizer: Its own.
        precision: As `memory.precision`.
        accumulate: Micro-batches in a step.
        batch: One of them; None where it is not known.
        place: Where memory ran out.
    """
    samples, context = _tokens_in(batch)
    split = optimizer.engine.chunks.split
    if place is not None and place.refusal == ONE_AT_A_TIME:
        split = max(1, samples)
    computed = "bf16" if precision == "adaptive" else precision
    memory = optimizer.memory.model_copy(update={"precision": computed, "split": split})
    try:
        plain = _as_before(model, optimizer) if samples else None
    except Exception:  # a model that cannot be copied: there is no plan then
        plain = None
    return StreamedSituation(plain, memory, samples, context, accumulate, place, _speeds(optimizer.engine.device))


def plan_streamed(situation: StreamedSituation) -> Estimate | None:
    """What the step was expected to take; None where the model or its batch cannot be rehearsed."""
    memory = situation.memory
    if situation.model is None:
        return None
    assert memory.mode != "resident" and memory.mode != "auto"  # noqa: PLR1714, PT018  # `stream` refuses these
    try:
        with isolated_randomness(seed=0):
            pieces = rehearse_pieces(
                situation.model, memory.mode, situation.samples, situation.context, memory.split,
                precision=memory.precision,
            )  # fmt: skip
        return estimate_streamed(pieces, memory, situation.hardware, keeps=False)
    except Exception:  # whatever the user's code cannot do without values: there is no plan then
        return None


def streamed_edits(situation: StreamedSituation, now: Estimate | None) -> list[Edit]:
    """The changes that help, those that cost the least time first; those whose time is not known keep their order.

    Args:
        situation: What did not fit.
        now: Its plan, where there is one.
    """
    found = [_priced(edit, situation, changed, now) for edit, changed in _changes(situation)]
    worth = [edit for edit in found if is_worth_it(edit, now)]
    worth.sort(key=lambda edit: (edit.more_time is None, edit.more_time or 0.0))
    return [*worth, *_others(situation)]


def _changes(situation: StreamedSituation) -> Iterator[tuple[Edit, StreamedSituation]]:
    """In the order of what they usually cost."""
    memory = situation.memory

    def with_(**update: Any) -> StreamedSituation:
        return replace(situation, memory=memory.model_copy(update=update))

    if not memory.offload_activations:
        price = "block inputs wait in host RAM"
        yield Edit("memory.offload_activations = true", price), with_(offload_activations=True)
    if situation.place is not None and situation.place.refusal not in ("", ONE_AT_A_TIME) and situation.samples > 1:
        parts = 2 * memory.split
        price = "fewer samples at a time; dropout draws other numbers"
        yield Edit(f"memory.split = {parts}", price), with_(split=parts)
    for slots in range(memory.max_gpu_blocks - 1, 0, -1):
        price = "copies have less of a head start" if slots > 1 else "copies have no head start"
        yield Edit(f"memory.max_gpu_blocks = {slots}", price), with_(max_gpu_blocks=slots)
    if memory.clipping == "exact" and situation.accumulate == 1:
        yield Edit('memory.clipping = "fused"', "clipped by the norm of the last step"), with_(clipping="fused")
    if situation.samples > 1:
        half = situation.samples // 2
        times = 2 * situation.accumulate
        if memory.clipping == "exact":
            setting, price = f"train.batch_size = {half} with train.accumulate = {times}", "the same samples in a step"
        else:
            setting, price = f"train.batch_size = {half}", "fewer samples in a step, and less work for each copy"
        yield Edit(setting, price), replace(situation, samples=half)
    if memory.mode in NEXT_MODES:
        mode, price = NEXT_MODES[memory.mode]
        yield Edit(f'memory.mode = "{mode}"', price), with_(mode=mode)
    if situation.context > 4:
        shorter = situation.context // 2
        yield Edit(f"model.context = {shorter}", "less context to learn from"), replace(situation, context=shorter)


def _others(situation: StreamedSituation) -> Iterator[Edit]:
    """What a plan says nothing of."""
    if situation.place == OUTSIDE_THE_BLOCKS:
        price = "the logits are computed twice, a tile at a time; if it is so already, with a smaller `tile_tokens`"
        yield Edit("`language_loss` as the loss", price)
    yield OTHER_PROGRAMS


def _priced(edit: Edit, before: StreamedSituation, changed: StreamedSituation, now: Estimate | None) -> Edit:
    after = None if now is None else plan_streamed(changed)
    if now is None or after is None:
        return edit
    more = None
    if now.seconds is not None and after.seconds is not None and changed.context == before.context:
        more = after.seconds / changed.samples / (now.seconds / before.samples) - 1
    return replace(edit, saved_bytes=now.gpu_bytes - after.gpu_bytes, more_time=more)


def _tokens_in(batch: Any) -> tuple[int, int]:
    """Sequences and tokens in each that a model computes; 0 and 0 for a batch that is not of tokens."""
    if isinstance(batch, Mapping):
        tokens: Any = batch.get("input_ids")
        return (int(tokens.shape[0]), int(tokens.shape[1])) if _are_tokens(tokens) else (0, 0)
    if isinstance(batch, list | tuple) and batch:
        return _tokens_in(batch[0])
    return (int(batch.shape[0]), int(batch.shape[1]) - 1) if _are_tokens(batch) and batch.shape[1] > 1 else (0, 0)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()


def _as_before(model: nn.Module, optimizer: StreamedOptimizer) -> nn.Module:
    """A copy without memory, whose blocks are computed where they are called."""
    plain = without_memory(model, left_out=optimizer)
    del plain.optimizer
    for block in find_blocks(plain).modules:
        block.__dict__.pop("forward", None)
    return plain


def _speeds(device: torch.device) -> Hardware | None:
    try:
        return speeds_at_hand(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    except Exception:  # a damaged file of measurements is no reason to say nothing
        return None
