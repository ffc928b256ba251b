"""The machine at hand, as far as a plan is made for it: its GPU and the host memory that is free."""

from __future__ import annotations

from typing import NamedTuple

import psutil
import torch


class Gpu(NamedTuple):
    """A GPU's name, as torch has it, and its memory."""

    name: str
    vram_bytes: int


def gpu_at_hand(index: int = 0) -> Gpu | None:
    """One of this machine's GPUs, the first where left out; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(index)
    return Gpu(properties.name, int(properties.total_memory))


def free_host_bytes() -> int:
    """Host memory that is available now."""
    return int(psutil.virtual_memory().available)
