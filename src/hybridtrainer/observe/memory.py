"""How much memory a run takes: the process's own, and that of its GPU. Looks; changes nothing, resets nothing.

torch's peak is kept for the whole process, and a reset would falsify what others measure with it. So the peak told
here is the highest so far: what decides whether a run fits.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from hybridtrainer.records import MemoryUse, PhaseChange, Record, StepResult

INTERVAL_STEPS = 10


def host_bytes() -> int | None:
    """Resident memory of this process; None where the system does not say."""
    try:
        return int(psutil.Process().memory_info().rss) or None
    except (psutil.Error, OSError):
        return None


def device_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """What tensors take on a GPU, and the most that torch has reserved there; None and None on any other device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None, None
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_reserved(device)


class MemoryWatch:
    """Tells the memory in use after every tenth step of the clock, and after a step in which the phase changed.

    Args:
        device: Where the model is.
        tell: Called with what was found.
        clock: Where it stands.
    """

    def __init__(self, device: torch.device, tell: Callable[[MemoryUse], None], clock: int = 0) -> None:
        self._device = device
        self._tell = tell
        self._clock = clock
        self._phase_changed = False

    def record(self, record: Record) -> None:
        """Takes in a step or a phase change."""
        if isinstance(record, PhaseChange):
            self._phase_changed = True
        elif isinstance(record, StepResult):
            before, self._clock = self._clock, record.step
            if self._phase_changed or before // INTERVAL_STEPS != record.step // INTERVAL_STEPS:
                self._phase_changed = False
                self._tell(MemoryUse(record.step, record.phase, host_bytes(), *device_bytes(self._device)))
