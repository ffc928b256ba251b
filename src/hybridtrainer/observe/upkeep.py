"""A run's memory, looked after while it trains: the GPU's pressure, the profile that a run folder keeps, the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hybridtrainer.config_conflicts import set_for_a_gpu
from hybridtrainer.config_memory import MemoryConfig, size_in_bytes
from hybridtrainer.memory.components import device_of
from hybridtrainer.memory.pressure import Pressure
from hybridtrainer.memory.vram import vram_of
from hybridtrainer.observe.plan_watch import PlanWatch
from hybridtrainer.observe.profiler import MemoryProfiler
from hybridtrainer.observe.snapshots import SnapshotFile
from hybridtrainer.records import Record

PROFILE = "profile.csv"
PROFILE_BYTES = "profile_bytes"  # in a checkpoint: how much of the profile belongs to it


class Upkeep:
    """Of one run.

    Args:
        model: What is trained.
        optimizer: With what.
        memory: `vram`, `cleanup_every` and `profile` count.

    Attributes:
        vram: Memory of the GPU that the model is on; None on any other device.
        profiler: Told of every step, where there is one.
        plan: What the run is held against, where it was planned.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, memory: MemoryConfig) -> None:
        self._model, self._optimizer, self._memory = model, optimizer, memory
        self.vram = vram_of(device_of(model, optimizer), size_in_bytes(memory.vram), optimizer)
        self.profiler: MemoryProfiler | None = None
        self.plan = PlanWatch(self.vram)
        self._file: SnapshotFile | None = None

    def keep_in(self, folder: Path, known: Mapping[str, Any] | None, stack: ExitStack) -> None:
        """Keeps the plan in a run's folder, and a profile, if the settings ask for one.

        Args:
            folder: Of the run.
            known: What the checkpoint says with which a run is resumed; None for a new run.
            stack: Closes the file.
        """
        self.plan.keep_in(folder, is_resumed=known is not None)
        if self._memory.profile:
            self._file = SnapshotFile(folder / PROFILE, None if known is None else known.get(PROFILE_BYTES))
            stack.callback(self._file.close)
            self.profiler = MemoryProfiler(
                self._model, self._optimizer, keep=False, follow=self._file.append, vram=self.vram
            )

    def start(
        self,
        say: Callable[[str], None],
        save: Callable[[], bool],
        clock: int,
        is_short: Callable[[], bool] = lambda: False,
    ) -> Pressure | None:
        """Begins; returns what watches the GPU, where there is one.

        Args:
            say: Called with what a person should know.
            save: Called where a checkpoint should be written; returns whether there will be one.
            clock: Where the run's clock stands.
            is_short: Says whether the model has yet to grow.
        """
        self.plan.start(say, clock, is_short)
        if self.profiler is not None:
            self.profiler.start()
        if self.vram is not None:
            return Pressure(self.vram, say, save, self._memory.cleanup_every, clock)
        for key in set_for_a_gpu(self._memory):
            say(f"memory.{key} does nothing here: there is no GPU")
        return None

    def record(self, record: Record) -> None:
        """Takes in what happened."""
        self.plan.record(record)
        if self.profiler is not None:
            self.profiler.record(record)

    def stop(self) -> None:
        """The run is over."""
        if self.profiler is not None:
            self.profiler.stop()

    def sizes(self) -> dict[str, int]:
        """For a checkpoint: how much of the profile belongs to it."""
        return {} if self._file is None else {PROFILE_BYTES: self._file.size()}
