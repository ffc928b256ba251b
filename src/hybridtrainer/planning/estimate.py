"""What a plan says: bytes by component on the GPU, in host memory and on disk, and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

WORKSPACE_BYTES = 64 << 20  # of cuBLAS, measured on an H200
FRAGMENT_SHARE = 0.08  # of a streamed block's activations and gradients; measured: 0.03 to 0.14
PROCESS_BYTES = 1075 << 20  # of Python, torch and CUDA in host memory; measured: 1.03 to 1.10 GiB
PRODUCTS_FP32_BYTES = 64 << 20  # more where products are in 32 bits; measured: 1.10 to 1.14 GiB in all


@dataclass(frozen=True)
class Estimate:
    """What one way of training takes.

    Attributes:
        gpu: Bytes that torch reserves on the GPU at the peak, by component; CUDA's own come on top.
        host: Bytes in host memory, by component.
        disk_bytes: Of one checkpoint.
        seconds: Of a step; None where the machine's speeds are not known.
        compute_seconds: Of the same computation without copies.
        predict_bytes: On the GPU while a jump is probed; None where that is not known.
        jump_host_bytes: In host memory beside `host`, for windows and a snapshot, where jumps are made.
        jump_disk_bytes: Of a checkpoint beside `disk_bytes`, for the windows.
        waits_for_host: Whether a step takes as long as the host needs to launch it.
    """

    gpu: Mapping[str, int]
    host: Mapping[str, int]
    disk_bytes: int
    seconds: float | None
    compute_seconds: float | None
    predict_bytes: int | None = None
    jump_host_bytes: int = 0
    jump_disk_bytes: int = 0
    waits_for_host: bool = False

    @property
    def gpu_bytes(self) -> int:
        """All that torch reserves."""
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> int:
        """All in host memory."""
        return sum(self.host.values())

    @property
    def share_of_compute(self) -> float:
        """The speed, as a share of that without copies."""
        if self.seconds is None or self.compute_seconds is None:
            return math.nan
        return self.compute_seconds / self.seconds


def averages_part(nbytes: int) -> dict[str, int]:
    """The component of averaged weights; none where there are none."""
    return {"averages": nbytes} if nbytes else {}
