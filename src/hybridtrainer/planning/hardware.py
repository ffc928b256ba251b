"""What a machine can do, as far as a plan needs it: speeds that were measured, or that somebody gives."""

from __future__ import annotations

from dataclasses import dataclass

from hybridtrainer.errors import ModelError


@dataclass(frozen=True)
class Hardware:
    """Speeds of one GPU and its link.

    Attributes:
        flops: Matrix products, operations in a second, as large ones reach them in 16 bits.
        memory: Bytes in a second that kernels read and write, as simple ones reach them.
        inward: Bytes in a second from host memory to the GPU.
        outward: The other way.
        both: Both ways at once, together.
        context_bytes: GPU memory that CUDA itself takes.
    """

    name: str
    flops: float
    memory: float
    inward: float
    outward: float
    both: float
    context_bytes: int


H200 = Hardware("NVIDIA H200", 710e12, 1.91e12, 55e9, 55e9, 90e9, 900 << 20)
"""Measured: the two speeds of computing are fitted to nine runs of `benchmarks.stream` without copies by
`benchmarks.plan_accuracy`."""


def known(name: str) -> Hardware:
    """Speeds by name.

    Raises:
        ModelError: for hardware that was not measured.
    """
    by_name = {"h200": H200}
    if name.lower() not in by_name:
        raise ModelError(f"The speeds of {name!r} are not known.", f"Known are: {', '.join(by_name)}.")
    return by_name[name.lower()]
