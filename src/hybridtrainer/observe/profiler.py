"""A memory profiler: what is in use after each step, what it is made of, and what it amounts to.

It needs no trainer of ours: call `record_step` in any loop. On a GPU it reads torch's allocator and never waits for the
device; on a CPU the resident memory of the process is what it profiles. What happens between two steps, such as an
evaluation, counts to the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim import Optimizer

from hybridtrainer.config_problems import shorten
from hybridtrainer.errors import ConfigError, ModelError, Problem
from hybridtrainer.memory.components import Components, components, device_of, gradient_bytes
from hybridtrainer.memory.vram import Vram, VramUse, vram_of
from hybridtrainer.observe.memory import host_bytes
from hybridtrainer.observe.profile_summary import SPIKE_BYTES, ProfileReport, Summary
from hybridtrainer.observe.snapshots import Snapshot, write_snapshots
from hybridtrainer.records import Record, StepResult

COUNT_INTERVAL = 50  # steps; going through all tensors takes longer than everything else here
FIRST_STEPS = 3  # in which optimizer states appear


class MemoryProfiler:
    """Takes a snapshot of memory after each step.

    On a GPU torch's peaks are reset at each step, to have that of the step: what your own program reads with
    `torch.cuda.max_memory_allocated` is then the peak since the last step.

    Args:
        model: Whose weights and gradients to tell apart from the rest; None does not tell them apart.
        optimizer: Whose states, likewise.
        device: Whose memory; the model's where left out, the CPU without a model.
        spike_bytes: From which rise of the peak on a step is a spike.
        keep: Whether snapshots are kept for `export`; without it only what they amount to is.
        follow: Called with every snapshot.
        vram: The GPU's memory, where somebody reads it already.
        clock: Seconds.

    Raises:
        ConfigError: if `spike_bytes` is no positive number of bytes.

    >>> model = nn.Linear(8, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> profiler = MemoryProfiler(model, optimizer)
    >>> profiler.start()
    >>> for _ in range(3):
    ...     model(torch.ones(4, 8)).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     profiler.record_step(phase="full")
    >>> report = profiler.report()
    >>> report.steps, report.peak_phase, report.phases["full"].components["gradients"]
    (3, 'full', 36)
    >>> profiler.stop()
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        device: torch.device | str | None = None,
        *,
        spike_bytes: int = SPIKE_BYTES,
        keep: bool = True,
        follow: Callable[[Snapshot], None] | None = None,
        vram: Vram | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(spike_bytes, int) or isinstance(spike_bytes, bool) or spike_bytes <= 0:
            problem = Problem("spike_bytes", f"must be a positive number of bytes, not {shorten(spike_bytes)}")
            raise ConfigError("the profiler", [problem], "Give it in bytes: spike_bytes=64 << 20.")
        self._model, self._optimizer = model, optimizer
        self._device = _indexed(torch.device(device)) if device is not None else _device(model, optimizer)
        self._vram = vram if vram is not None else vram_of(self._device, None, optimizer)
        self._spike_bytes, self._keep, self._follow, self._clock = spike_bytes, keep, follow, clock
        self._process = psutil.Process()
        self._handle: Any = None
        self._summary: Summary | None = None
        self._is_running = False
        self.snapshots: list[Snapshot] = []

    def start(self) -> None:
        """Forgets what was seen before and begins; memory in use now is what a run starts with."""
        self.stop()
        self.snapshots = []
        self._count = self._gradients = 0
        self._stepped = False
        self._before: int | None = None
        self._counted, self._phase = Components(), ""
        if self._optimizer is not None:
            self._handle = self._optimizer.register_step_pre_hook(self._before_update)
        if self._vram is not None:
            limit = self._vram.limit_bytes
            initial: int | None = self._vram.begin_peaks().allocated_bytes
        else:
            limit, initial = psutil.virtual_memory().total, host_bytes(self._process)
        self._summary = Summary(initial, limit, self._named_device(), self._spike_bytes)
        self._began = self._clock()
        self._is_running = True

    def record_step(self, phase: str = "train", step: int | None = None) -> None:
        """Takes a snapshot; call it once a step is complete.

        Args:
            phase: By which snapshots are told apart in the report.
            step: The clock; counted from 1 where left out.

        Raises:
            ModelError: if the profiler was not started, or is stopped.
        """
        if self._summary is None:
            raise ModelError("The profiler was not started.", "Call `start()` before the first step.")
        if not self._is_running:
            raise ModelError(
                "The profiler is stopped, and takes no more steps.",
                "Call `stop()` after the last step, or `start()` again, which forgets what was seen.",
            )
        use = self._vram.begin_peaks() if self._vram is not None else None
        self._count += 1
        if self._model is not None and (self._is_due() or phase != self._phase):
            self._counted = components(self._model, self._optimizer, self._device)
        self._phase = phase
        snapshot = self._snapshot(self._count if step is None else step, phase, use)
        self._stepped, self._before = False, None
        self._summary.take(snapshot)
        if self._keep:
            self.snapshots.append(snapshot)
        if self._follow is not None:
            self._follow(snapshot)

    def record(self, record: Record) -> None:
        """Takes a snapshot after each step of a trainer, as one of its listeners, until it is stopped."""
        if isinstance(record, StepResult) and (self._is_running or self._summary is None):
            self.record_step(str(record.phase), record.step)

    def report(self) -> ProfileReport:
        """What was seen so far.

        Raises:
            ModelError: if the profiler was not started.
        """
        if self._summary is None:
            raise ModelError("The profiler was not started, so there is nothing to report.", "Call `start()` first.")
        return self._summary.report()

    def export(self, path: str | Path) -> None:
        """Writes all snapshots: as CSV to a name that ends in .csv, as JSON lines to one in .jsonl.

        Raises:
            ModelError: if snapshots were not kept, or the profiler was not started.
            RunFolderError: if the name ends otherwise, or the file cannot be written.
        """
        if not self._keep:
            raise ModelError("This profiler keeps no snapshots.", "Make it with keep=True.")
        if self._summary is None:
            raise ModelError("The profiler was not started, so there is nothing to export.", "Call `start()` first.")
        write_snapshots(Path(path), self.snapshots)

    def stop(self) -> None:
        """Leaves the optimizer as it was; what was seen stays."""
        self._is_running = False
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_update(self, *_: Any) -> None:
        """An update is about to be made: now there are gradients, which may be gone when the step is recorded."""
        self._stepped = True
        if self._vram is None:
            self._before = host_bytes(self._process)
        if self._model is not None and (self._is_due() or not self._gradients):
            self._gradients = gradient_bytes(self._model.parameters(), self._device)

    def _is_due(self) -> bool:
        return self._count <= FIRST_STEPS or self._count % COUNT_INTERVAL == 0

    def _snapshot(self, step: int, phase: str, use: VramUse | None) -> Snapshot:
        resident = host_bytes(self._process)
        used = resident if use is None else use.allocated_bytes
        peak = max(resident or 0, self._before or 0) or None if use is None else use.allocated_peak_bytes
        counted = self._counted
        gradients = max(counted.gradients, self._gradients if self._stepped else 0)
        rest = None
        if self._model is not None and peak is not None:
            rest = max(0, peak - counted.weights - counted.states - gradients)
        known = self._model is not None
        return Snapshot(
            step=step,
            phase=phase,
            seconds=round(self._clock() - self._began, 6),
            used_bytes=used,
            peak_bytes=peak,
            reserved_bytes=use.reserved_peak_bytes if use is not None else None,
            card_bytes=use.card_bytes if use is not None else None,
            host_bytes=resident,
            weights_bytes=counted.weights if known else None,
            states_bytes=counted.states if known else None,
            gradients_bytes=gradients if known else None,
            other_bytes=rest,
        )

    def _named_device(self) -> str:
        if self._device.type == "cuda" and torch.cuda.is_available():
            return torch.cuda.get_device_name(self._device)
        return "host memory of the process"


def _device(model: nn.Module | None, optimizer: Optimizer | None) -> torch.device:
    return device_of(model, optimizer) if model is not None else torch.device("cpu")


def _indexed(device: torch.device) -> torch.device:
    """With its number, as tensors have it."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
