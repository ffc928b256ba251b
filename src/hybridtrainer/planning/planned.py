"""What of an estimate a run is held against afterwards."""

from __future__ import annotations

from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.records import Planned


def planned_of(estimate: Estimate, hardware: Hardware | None, on_gpu: bool, text: str = "") -> Planned:
    """The figures of a plan that can be measured.

    Args:
        estimate: What was chosen takes.
        hardware: Whose speeds it was planned with.
        on_gpu: Whether it runs on a GPU; on a CPU all of it is in host memory.
        text: The plan in one line.
    """
    why_no_seconds = ""
    if estimate.seconds is None and not on_gpu:
        why_no_seconds = "plans have seconds for GPUs only"
    elif estimate.seconds is None:
        why_no_seconds = (
            "the plan has none, because the speeds of this GPU are not known (`hybridtrainer doctor --calibrate`)"
            if hardware is None
            else "the plan has none for arithmetic in 32 bits"
        )
    return Planned(
        text,
        estimate.gpu_bytes if on_gpu else None,
        estimate.host_bytes + (0 if on_gpu else estimate.gpu_bytes),
        estimate.jump_host_bytes,
        estimate.seconds,
        why_no_seconds,
        estimate.waits_for_host,
        "" if hardware is None else hardware.origin,
    )
