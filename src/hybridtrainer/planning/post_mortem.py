"""What to say when GPU memory has run out: where, plan beside measurement, and what would help.

Nothing here trains or saves. Where it was in a streamed model is said there, see `memory/post_mortem.py`.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import GpuMemoryError
from hybridtrainer.losses import LossFunction
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.phases import TABLE
from hybridtrainer.memory.post_mortem import IN_AN_UPDATE, module_in, place_of
from hybridtrainer.memory.vram import device_bytes
from hybridtrainer.parts import divide
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.remedies import Edit, Situation, ranked_edits, rehearse_situation
from hybridtrainer.planning.streamed_remedies import plan_streamed, streamed_edits, streamed_situation
from hybridtrainer.predict.averages import averages_here
from hybridtrainer.records import Phase
from hybridtrainer.sizes import as_size
from hybridtrainer.smaller_step import NothingSmaller
from hybridtrainer.state import Training

A_STEP = "a step"
LONGEST_QUOTE = 200  # characters of a message of torch in which nothing is known
_TRIED = re.compile(r".*?Tried to allocate [\d.]+ \w+")
TORN = "Some blocks are updated and others are not: the model is between two steps until a checkpoint is loaded."


@dataclass(frozen=True)
class _Found:
    """What is said of an error besides phase and step."""

    doing: str
    why: str
    plan: Estimate | None
    edits: Sequence[Edit]
    device: torch.device
    standing: str = ""


class PostMortem:
    """Explains errors of GPU memory for one training setup.

    Args:
        training: Model and optimizer.
        loss_fn: The user's own.
        config: Its settings.
        accumulate: Micro-batches in a step.
        has_probes: Whether there are held-out batches by which averages of the weights are chosen.
    """

    def __init__(
        self, training: Training, loss_fn: LossFunction, config: HybridTrainerConfig, accumulate: int, has_probes: bool
    ) -> None:
        self._training, self._loss_fn = training, loss_fn
        self._memory, self._accumulate = config.memory, accumulate
        self._averages = averages_here(training, config, has_probes)

    @contextmanager
    def explained(self, doing: str, phase: Phase, step: int) -> Iterator[None]:
        """Raises what `told` returns."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            told = self.told(error, doing, phase, step)
            if told is error:
                raise
            raise told from error

    def told(
        self, error: BaseException, doing: str, phase: Phase, step: int, micro_batches: Sequence[Any] = ()
    ) -> BaseException:
        """The error with its explanation, if it is one of GPU memory; the error itself if not.

        Args:
            error: What was raised.
            doing: What it was raised in, where it does not say so itself.
            phase: Of the step.
            step: The clock before it.
            micro_batches: What was computed, where that is known.
        """
        if not isinstance(error, torch.OutOfMemoryError):
            return error
        optimizer = self._training.optimizer
        if isinstance(optimizer, StreamedOptimizer):
            found = self._of_streamed(optimizer, error, doing, micro_batches)
        else:
            found = self._of_resident(error, doing, phase, micro_batches)
        what = [
            f"Out of GPU memory in {found.doing} (phase {phase.value}, after step {step}): {_torch_says(error)}",
            f"It was not divided further: {found.why}." if found.why else "",
            found.standing,
            _plan_beside(found.plan, doing == A_STEP, *device_bytes(found.device)),
        ]
        return GpuMemoryError(" ".join(filter(None, what)), _as_list(found.edits))

    def _of_resident(
        self, error: torch.OutOfMemoryError, doing: str, phase: Phase, micro_batches: Sequence[Any]
    ) -> _Found:
        traceback.clear_frames(error.__traceback__)  # what they hold on to is memory that a last checkpoint may need
        parts, why = 1, ""
        if isinstance(error, NothingSmaller):
            doing, parts, why = error.doing, error.parts, error.refusal
            doing += f", in `{error.module}`" if error.module else ""
        situation = self._situation(micro_batches, parts, doing, phase)
        now = rehearse_situation(situation)
        plan, edits = now.estimate if now else None, ranked_edits(situation, now)
        return _Found(doing, why, plan, edits, next(self._training.model.parameters()).device)

    def _of_streamed(
        self, optimizer: StreamedOptimizer, error: torch.OutOfMemoryError, doing: str, micro_batches: Sequence[Any]
    ) -> _Found:
        model, place, why = self._training.model, place_of(error), ""
        module = module_in(error, model)
        traceback.clear_frames(error.__traceback__)
        if place is not None:
            doing, why = place.doing if doing == A_STEP else f"{doing}, in {place.doing}", place.refusal
        doing += f", in `{module}`" if module else ""
        batch = micro_batches[0] if micro_batches else None
        situation = streamed_situation(model, optimizer, self._memory.precision, self._accumulate, batch, place)
        plan = plan_streamed(situation)
        edits = streamed_edits(situation, plan)
        standing = TORN if optimizer.engine.torn and place != IN_AN_UPDATE else ""
        return _Found(doing, why, plan, edits, optimizer.engine.device, standing)

    def _situation(self, micro_batches: Sequence[Any], parts: int, doing: str, phase: Phase) -> Situation:
        memory = self._memory
        if memory.checkpoint_keep == "by_phase":
            memory = memory.model_copy(update={"checkpoint_keep": TABLE[phase].recompute or "inputs"})
        batch = micro_batches[0] if micro_batches else None
        pieces = divide(batch, parts) if parts > 1 else [batch]
        part = batch if isinstance(pieces, str) else pieces[0]
        return Situation(self._training, self._loss_fn, memory, self._accumulate, part, doing, self._averages)


def _torch_says(error: BaseException) -> str:
    """What torch tried to allocate.

    The rest of its message, every process on the card and settings of its allocator, would bury what is said here.
    """
    lines = str(error).splitlines()
    if not lines:
        return "torch says no more."
    tried = _TRIED.match(lines[0])
    return f"{(tried[0] if tried else lines[0][:LONGEST_QUOTE]).rstrip('. ')}."


def _plan_beside(estimate: Estimate | None, is_step: bool, tensors: int | None, reserved: int | None) -> str:
    """Plan and measurement, as far as they are known."""
    if not is_step:
        plan = "Plans are of training steps, and this was none."
    elif estimate is None:
        plan = "A plan cannot be made for this model."
    else:
        parts = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in estimate.gpu.items())
        plan = f"Planned were {as_size(estimate.gpu_bytes)}: {parts}."
    if tensors is None or reserved is None:
        return f"{plan} What was in use is not known on this device."
    return f"{plan} Measured: {as_size(tensors)} in tensors now, {as_size(reserved)} reserved at most."


def _as_list(edits: Sequence[Edit]) -> str:
    return "What takes less, the cheapest first:\n" + "\n".join(f"  {edit}" for edit in edits)
