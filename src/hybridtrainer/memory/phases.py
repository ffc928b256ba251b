"""What memory each phase may use, in one table, and the two places where a training run follows it.

Real steps of every phase keep the same things, so they are arranged alike: a Correct step has as many activations and
states beside it as a Full one, and computing less of it again would only move the peak there. A probe has no graph
and needs neither gradients nor optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hybridtrainer.config import MemoryConfig
from hybridtrainer.memory.int8 import int8_matrices
from hybridtrainer.memory.offload import offload_blocks
from hybridtrainer.memory.parking import Leaves, Parking, on_gpu
from hybridtrainer.memory.recompute import recompute_blocks
from hybridtrainer.records import Phase
from hybridtrainer.state import Training
from hybridtrainer.weights import HostCopy


@dataclass(frozen=True)
class Means:
    """What a phase may use.

    Attributes:
        recompute: Whether blocks may be computed again, rather than kept.
        offload: Whether what is kept may wait in host memory.
        int8: Whether matrices may be read as 8-bit copies.
        states_leave: Whether optimizer states may leave the device.
    """

    recompute: bool = False
    offload: bool = False
    int8: bool = False
    states_leave: bool = False


REAL_STEP = Means(recompute=True, offload=True)
TABLE: dict[Phase, Means] = {
    Phase.WARMUP: REAL_STEP,
    Phase.FULL: REAL_STEP,
    Phase.PREDICT: Means(int8=True, states_leave=True),
    Phase.CORRECT: REAL_STEP,
}


def arrange_blocks(model: nn.Module, memory: MemoryConfig) -> None:
    """Prepares the blocks of a resident model for real steps; without gradients they run as they are.

    Raises:
        ModelError: if the model has no repeated blocks, and the configuration needs them.
    """
    real = TABLE[Phase.FULL]
    recompute = real.recompute and memory.checkpoint_every > 0
    offload = real.offload and memory.mode == "resident" and memory.offload_activations
    if recompute or offload:
        offload_blocks(model, on=False)
    if recompute:
        recompute_blocks(model, memory.checkpoint_every)
    if offload:
        offload_blocks(model)


class PredictMemory:
    """Makes room while a jump is tried: gradients are gone after every real step, what else may leave does.

    Args:
        training: The model and its optimizer.
        memory: Which of the options are on.
        leaves: Which tensors take device memory.
    """

    def __init__(self, training: Training, memory: MemoryConfig, leaves: Leaves = on_gpu) -> None:
        means = TABLE[Phase.PREDICT]
        self._training = training
        self._int8 = means.int8 and memory.predict_int8
        self._leave = means.states_leave and memory.predict_states == "leave"
        self._home = HostCopy()
        self._weights, self._states = Parking(leaves, hollow=True), Parking(leaves)

    def probing(self) -> AbstractContextManager[Any]:
        """While open, the model is measured and nothing else."""
        if not self._int8:
            return nullcontext()
        return int8_matrices(self._training.model, self._home, self._weights)

    @contextmanager
    def trying(self, saved: Mapping[str, Any]) -> Iterator[None]:
        """While open, a jump is tried; the optimizer's states are not changed meanwhile.

        Args:
            saved: What the run returns to if the jump does not pay: it has an exact copy of the states in host memory,
                so that nothing need be copied to let them leave.
        """
        try:
            if self._leave:
                self._states.park(_pairs(self._training.optimizer.state_dict(), saved["optimizer"]))
            yield
        finally:
            self._states.bring_back()

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
