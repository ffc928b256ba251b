"""Well-known cards, as their data sheets have them: given, not measured.

A training step reaches less than a data sheet says. How much less is taken from the one card that was measured, the
H200 (989 TFLOP/s, 4.8 TB/s, PCIe 5.0 x16): of its products, of its memory, of its link one way and both ways. A card
of your own is better measured: `hybridtrainer doctor --calibrate`.
"""

from __future__ import annotations

from typing import NamedTuple

from hybridtrainer.planning.hardware import H200, Hardware
from hybridtrainer.sizes import GIB

FLOPS_SHARE = H200.flops / 989e12
MEMORY_SHARE = H200.memory / 4.8e12
LINK_SHARE = H200.inward / 63e9
BOTH_SHARE = H200.both / 63e9
ORIGIN = (
    f"given: the data sheet times {FLOPS_SHARE:.2f} (products), {MEMORY_SHARE:.2f} (memory), "
    f"{LINK_SHARE:.2f} (link); not measured"
)
PCIE_4_X8, PCIE_4_X16, PCIE_5_X16 = 15.8e9, 31.5e9, 63e9


class Card(NamedTuple):
    """A data sheet.

    Attributes:
        name: As torch names it.
        tflops: Dense products of bf16 with sums in fp32, by the tensor cores.
        gb_per_s: Of its memory.
        link: Bytes in a second one way, by the standard.
        gib: Memory.
    """

    name: str
    tflops: float
    gb_per_s: float
    link: float
    gib: int


CARDS: dict[str, Card] = {
    "rtx-3060": Card("NVIDIA GeForce RTX 3060", 25.5, 360, PCIE_4_X16, 12),
    "rtx-3070": Card("NVIDIA GeForce RTX 3070", 40.6, 448, PCIE_4_X16, 8),
    "rtx-3080": Card("NVIDIA GeForce RTX 3080", 59.5, 760, PCIE_4_X16, 10),
    "rtx-3090": Card("NVIDIA GeForce RTX 3090", 71, 936, PCIE_4_X16, 24),
    "rtx-4060": Card("NVIDIA GeForce RTX 4060", 30.2, 272, PCIE_4_X8, 8),
    "rtx-4060-ti-16gb": Card("NVIDIA GeForce RTX 4060 Ti", 44.1, 288, PCIE_4_X8, 16),
    "rtx-4070": Card("NVIDIA GeForce RTX 4070", 58.3, 504, PCIE_4_X16, 12),
    "rtx-4080": Card("NVIDIA GeForce RTX 4080", 97.5, 717, PCIE_4_X16, 16),
    "rtx-4090": Card("NVIDIA GeForce RTX 4090", 165, 1008, PCIE_4_X16, 24),
    "rtx-5090": Card("NVIDIA GeForce RTX 5090", 209.5, 1792, PCIE_5_X16, 32),
    "l4": Card("NVIDIA L4", 121, 300, PCIE_4_X16, 24),
    "a100-40gb": Card("NVIDIA A100-SXM4-40GB", 312, 1555, PCIE_4_X16, 40),
    "a100-80gb": Card("NVIDIA A100-SXM4-80GB", 312, 2039, PCIE_4_X16, 80),
    "h100": Card("NVIDIA H100 80GB HBM3", 989, 3350, PCIE_5_X16, 80),
}
"""Dense figures, as far as NVIDIA publishes them; for GeForce cards twice their fp32 rate, which is what sums in fp32
leave of it."""


def speeds_of(card: Card) -> Hardware:
    """What a training step can be expected to reach on a card.

    >>> round(speeds_of(CARDS["rtx-4070"]).flops / 1e12)
    42
    """
    return Hardware(
        card.name,
        FLOPS_SHARE * card.tflops * 1e12,
        MEMORY_SHARE * card.gb_per_s * 1e9,
        LINK_SHARE * card.link,
        LINK_SHARE * card.link,
        BOTH_SHARE * card.link,
        H200.context_bytes,
        H200.launch,
        ORIGIN,
        card.gib * GIB,
    )


BUILT_IN: dict[str, Hardware] = {"h200": H200} | {name: speeds_of(card) for name, card in CARDS.items()}
"""All that are known without a file, by the name to ask for."""
