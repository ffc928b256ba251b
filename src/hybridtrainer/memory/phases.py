"""What memory each phase may use, in one table, and the two places where a training run follows it.

    Warmup, Full    blocks computed again from their inputs
    Predict         8-bit copies, nothing computed again: a probe has no graph, and needs no optimizer states
    Correct         only what is cheap computed again: results of products are kept

The table is followed with `memory.checkpoint_keep = "by_phase"`; "inputs" and "products" arrange all real steps alike.
A Correct step has as many activations and states beside it as a Full one, so that computing less of it again moves the
peak of the run there. "by_phase" is for a card on which a Correct step has that room; where it has not,
`smaller_step.py` divides the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.measure import wait_for_device
from hybridtrainer.memory.int8 import int8_matrices
from hybridtrainer.memory.offload import offload_blocks
from hybridtrainer.memory.parking import Leaves, Parking, on_gpu
from hybridtrainer.memory.recompute import Keep, Segments, recompute_blocks
from hybridtrainer.records import Phase
from hybridtrainer.state import Training
from hybridtrainer.weights import HostCopy

FETCH_SHARE = 0.05  # of the time of the foreseen steps, within which fetching the states back must be


@dataclass(frozen=True)
class Means:
    """What a phase may use.

    Attributes:
        recompute: What is kept of blocks that are computed again; None where none is.
        offload: Whether what is kept may wait in host memory.
        int8: Whether matrices may be read as 8-bit copies.
        states_leave: Whether optimizer states may leave the device.
    """

    recompute: Keep | None = None
    offload: bool = False
    int8: bool = False
    states_leave: bool = False


TABLE: dict[Phase, Means] = {
    Phase.WARMUP: Means(recompute="inputs", offload=True),
    Phase.FULL: Means(recompute="inputs", offload=True),
    Phase.PREDICT: Means(int8=True, states_leave=True),
    Phase.CORRECT: Means(recompute="products", offload=True),
}


@dataclass(frozen=True)
class Arranged:
    """Blocks that are prepared for real steps.

    Attributes:
        segments: What is computed again; None where nothing is.
        keep: As `memory.checkpoint_keep`.
    """

    segments: Segments | None
    keep: Literal["inputs", "products", "by_phase"]

    def enter(self, phase: Phase) -> Phase:
        """Lets the real steps to come keep what `phase` may; returns it."""
        kept = TABLE[phase].recompute if self.keep == "by_phase" else self.keep
        if self.segments is not None and kept is not None:
            self.segments.keep = kept
        return phase


def arrange_blocks(model: nn.Module, memory: MemoryConfig) -> Arranged:
    """Prepares the blocks of a resident model for real steps; without gradients they run as they are.

    Raises:
        ModelError: if the model has no repeated blocks, and the configuration needs them.
    """
    real = TABLE[Phase.FULL]
    recompute = real.recompute is not None and memory.checkpoint_every > 0
    offload = real.offload and memory.mode == "resident" and memory.offload_activations
    if recompute or offload:
        offload_blocks(model, on=False)
    segments = recompute_blocks(model, memory.checkpoint_every) if recompute else None
    if offload:
        offload_blocks(model)
    return Arranged(segments, memory.checkpoint_keep)


def as_they_are(model: nn.Module) -> nn.Module:
    """The model with its blocks as they were made, whatever another trainer has arranged."""
    offload_blocks(model, on=False)
    recompute_blocks(model, 0)
    return model


class PredictMemory:
    """Makes room while a jump is tried: gradients are gone after every real step, what else may leave does.

    Args:
        training: The model and its optimizer.
        memory: Which of the options are on.
        step_seconds: Tells how long a real step takes.
        leaves: Which tensors take device memory.
    """

    def __init__(
        self,
        training: Training,
        memory: MemoryConfig,
        step_seconds: Callable[[], float] = lambda: 0.0,
        leaves: Leaves = on_gpu,
    ) -> None:
        means = TABLE[Phase.PREDICT]
        self._training = training
        self._int8 = means.int8 and memory.predict_int8
        self._states_may = memory.predict_states if means.states_leave else "stay"
        self._step_seconds = step_seconds
        self._fetch_seconds = 0.0  # as measured the last time
        self._home = HostCopy()
        self._weights, self._states = Parking(leaves, hollow=True), Parking(leaves)

    def probing(self) -> AbstractContextManager[Any]:
        """While open, the model is measured and nothing else."""
        if not self._int8:
            return nullcontext()
        return int8_matrices(self._training.model, self._home, self._weights)

    @contextmanager
    def trying(self, saved: Mapping[str, Any], foreseen_steps: int) -> Iterator[None]:
        """While open, a jump is tried; the optimizer's states are not changed meanwhile.

        Args:
            saved: What the run returns to if the jump does not pay: it has an exact copy of the states in host memory,
                so that nothing need be copied to let them leave.
            foreseen_steps: What the jump may save, beside which fetching the states back must be short.
        """
        try:
            if self._pays(foreseen_steps):
                self._states.park(_pairs(self._training.optimizer.state_dict(), saved["optimizer"]))
            yield
        finally:
            self._fetch()

    def _pays(self, foreseen_steps: int) -> bool:
        """Whether states leave; where that depends, they do the first time, and are timed."""
        if self._states_may != "auto":
            return self._states_may == "leave"
        return self._fetch_seconds <= FETCH_SHARE * foreseen_steps * self._step_seconds()

    def _fetch(self) -> None:
        if self._states_may != "auto" or not self._states.is_used:
            self._states.bring_back()
            return
        wait_for_device(self._training.model)
        began = time.perf_counter()
        self._states.bring_back()
        wait_for_device(self._training.model)
        self._fetch_seconds = time.perf_counter() - began

    @property
    def is_away(self) -> bool:
        """Whether something could not be brought back."""
        return self._weights.is_used or self._states.is_used

    def bring_back(self, *, states: bool = True) -> None:
        """Tries again to bring back what did not fit when it should have come."""
        self._weights.bring_back()
        if states:
            self._states.bring_back()


def _pairs(live: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    for index, values in live["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                yield value, saved["state"][index][name]
