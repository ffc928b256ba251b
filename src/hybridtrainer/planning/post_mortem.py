"""What to say when GPU memory has run out in a resident model: where, plan beside measurement, and what would help.

Nothing here trains or saves. A streamed model says it for itself, see `memory/post_mortem.py`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import GpuMemoryError
from hybridtrainer.losses import LossFunction
from hybridtrainer.memory.phases import TABLE
from hybridtrainer.memory.vram import device_bytes
from hybridtrainer.parts import divide
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.remedies import Edit, Situation, ranked_edits, rehearse_situation
from hybridtrainer.predict.averages import averages_here
from hybridtrainer.records import Phase
from hybridtrainer.sizes import as_size
from hybridtrainer.smaller_step import NothingSmaller
from hybridtrainer.state import Streamed, Training


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
        """The error with its explanation, if it is one of GPU memory in a resident model; the error itself if not.

        Args:
            error: What was raised.
            doing: What it was raised in, where it does not say so itself.
            phase: Of the step.
            step: The clock before it.
            micro_batches: What was computed, where that is known.
        """
        if not isinstance(error, torch.OutOfMemoryError) or isinstance(self._training.optimizer, Streamed):
            return error
        traceback.clear_frames(error.__traceback__)  # what they hold on to is memory that a last checkpoint may need
        parts, why = 1, ""
        if isinstance(error, NothingSmaller):
            doing, parts, why = error.doing, error.parts, error.refusal
            doing += f", in `{error.module}`" if error.module else ""
        situation = self._situation(micro_batches, parts, doing, phase)
        now = rehearse_situation(situation)
        measured = device_bytes(next(self._training.model.parameters()).device)
        what = [
            f"Out of GPU memory in {doing} (phase {phase.value}, after step {step}): {_first_line(error)}",
            f"It was not divided further: {why}." if why else "",
            _plan_beside(now.estimate if now else None, *measured),
        ]
        edits = ranked_edits(situation, now)
        return GpuMemoryError(" ".join(filter(None, what)), _as_list(edits))

    def _situation(self, micro_batches: Sequence[Any], parts: int, doing: str, phase: Phase) -> Situation:
        memory = self._memory
        if memory.checkpoint_keep == "by_phase":
            memory = memory.model_copy(update={"checkpoint_keep": TABLE[phase].recompute or "inputs"})
        batch = micro_batches[0] if micro_batches else None
        pieces = divide(batch, parts) if parts > 1 else [batch]
        part = batch if isinstance(pieces, str) else pieces[0]
        return Situation(self._training, self._loss_fn, memory, self._accumulate, part, doing, self._averages)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{lines[0].rstrip('.')}." if lines else "torch says no more."


def _plan_beside(estimate: Estimate | None, tensors: int | None, reserved: int | None) -> str:
    """Plan and measurement, as far as they are known."""
    if estimate is None:
        plan = "A plan cannot be made for this model."
    else:
        parts = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in estimate.gpu.items())
        plan = f"Planned were {as_size(estimate.gpu_bytes)}: {parts}."
    if tensors is None or reserved is None:
        return f"{plan} What was in use is not known on this device."
    return f"{plan} Measured: {as_size(tensors)} in tensors now, {as_size(reserved)} reserved at most."


def _as_list(edits: Sequence[Edit]) -> str:
    return "What takes less, the cheapest first:\n" + "\n".join(f"  {edit}" for edit in edits)
