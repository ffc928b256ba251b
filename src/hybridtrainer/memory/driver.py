"""What the driver says of a GPU's memory: NVML's answer, nvidia-smi's where NVML is missing, or None. Never waited for.

Only the driver sees CUDA's own memory and that of other processes. But it may be missing, hang or talk nonsense, and no
run may wait for it: a thread asks, whoever reads gets the newest answer at once, and a question that has been open for
two seconds counts as unanswered.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

PATIENCE_SECONDS = 2.0
INTERVAL_SECONDS = 5.0  # nvidia-smi takes a tenth of a second of a processor
MIB = 1 << 20


class CardUse(NamedTuple):
    """Memory of a whole card.

    Attributes:
        used_bytes: By every process, CUDA's own included.
        total_bytes: That it has.
    """

    used_bytes: int
    total_bytes: int


Ask = Callable[[], CardUse | None]
"""Asks the driver, however long that takes; None where it does not say."""


class Driver:
    """The newest answer of a driver, which is asked in the background.

    Args:
        ask: Called in a thread; whatever it raises counts as no answer.
        clock: Seconds.
    """

    def __init__(self, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._asked_at: float | None = None
        self._answer: CardUse | None = None
        self._open = threading.Event()

    def latest(self) -> CardUse | None:
        """The newest answer, at once; None where there is none, or where the driver has stopped answering."""
        now = self._clock()
        if self._open.is_set():
            assert self._asked_at is not None
            return self._answer if now - self._asked_at <= PATIENCE_SECONDS else None
        if self._asked_at is None or now - self._asked_at >= INTERVAL_SECONDS:
            self._asked_at = now
            self._open.set()
            threading.Thread(target=self._listen, name="gpu-memory", daemon=True).start()
        return self._answer

    def _listen(self) -> None:
        try:
            self._answer = sensible(self._ask())
        except Exception:
            self._answer = None
        finally:
            self._open.clear()


def sensible(use: CardUse | None) -> CardUse | None:
    """The answer if a card can have so much memory and so much of it in use; our own process is on it, so not 0.

    >>> sensible(CardUse(3 << 30, 16 << 30)) is not None, sensible(CardUse(0, 16 << 30)), sensible(CardUse(3, 2))
    (True, None, None)
    """
    return use if use is not None and 0 < use.used_bytes <= use.total_bytes else None


def asking(uuid: str) -> Ask:
    """A question about the card of that UUID, to whoever can answer it; found out when it is first asked.

    Args:
        uuid: As the driver writes it, "GPU-" included: numbers of cards mean other cards to torch than to the driver.
    """
    found: list[Ask] = []

    def ask() -> CardUse | None:
        if not found:
            found.append(_nvml(uuid) or _nvidia_smi(uuid) or (lambda: None))
        return found[0]()

    return ask


def _nvml(uuid: str) -> Ask | None:
    """NVML's answer; None where the package or the driver's library is missing."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        return None

    def ask() -> CardUse:
        memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid))
        return CardUse(int(memory.used), int(memory.total))

    return ask


def _nvidia_smi(uuid: str) -> Ask | None:
    """The program's answer; None where it is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, f"--id={uuid}", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]

    def ask() -> CardUse:
        done = subprocess.run(query, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
        used, total = (int(figure) * MIB for figure in done.stdout.split(","))
        return CardUse(used, total)

    return ask
