"""What a machine can do, as far as a plan needs it: speeds that were measured, or that somebody gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Speeds of one GPU, its link and its host.

    Attributes:
        flops: Matrix products, operations in a second, as a training step reaches them in 16 bits.
        memory: Bytes in a second that all other kernels read and write, as a training step reaches them.
        inward: Bytes in a second from host memory to the GPU.
        outward: The other way.
        both: Both ways at once, together.
        context_bytes: GPU memory that CUDA itself takes.
        launch: Seconds of the host for each kernel; what holds up small models.
        origin: Where the figures are from, in words.
        vram_bytes: The card's memory; None where it is not known.
    """

    name: str
    flops: float
    memory: float
    inward: float
    outward: float
    both: float
    context_bytes: int
    launch: float = 0.0
    origin: str = "given"
    vram_bytes: int | None = None

    def seconds(self, flops: float, nbytes: float) -> float:
        """Of so many operations in products and so many bytes in other kernels."""
        return flops / self.flops + nbytes / self.memory


H200 = Hardware(
    "NVIDIA H200", 710e12, 1.91e12, 55e9, 55e9, 90e9, 780 << 20, 50e-6, "fitted to runs measured on one", 140 << 30
)
"""The two speeds of computing were fitted to nine runs of an earlier `benchmarks.stream` without copies; those of today
are within 6% with them. The host took 39 to 53 us for a launch on four machines."""
