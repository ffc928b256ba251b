"""Orders ways to train that fit: precision is given up only for memory, time only for memory or precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrainer.config import MemoryConfig
from hybridtrainer.kernels.formats import Mode
from hybridtrainer.planning.estimate import Estimate

MODES: tuple[Mode, ...] = ("split8", "sr8", "sr4", "factored")
SLOTS = (3, 4, 2, 1)
RESIDENT_MARGIN = 0.3  # by which a streamed model must be faster: it has 8-bit moments and makes no jumps of itself
SPARE_SHARE = 0.02  # of a step; a plan that is so little faster is not worth more memory


@dataclass(frozen=True)
class Option:
    """One way to train.

    Attributes:
        memory: The settings.
        estimate: What they take.
    """

    memory: MemoryConfig
    estimate: Estimate


def ranked(options: Sequence[Option]) -> list[Option]:
    """The best first, one for each mode and place of the activations.

    A resident model that keeps all its activations comes first: nothing is computed twice, nothing is rounded. Then
    those with exact fp32 weights that compute blocks again, resident or split8, by speed where it is known: resident
    unless streaming is faster by `RESIDENT_MARGIN`. Then the modes that round weights, most exact first; in each the
    fastest, and of those about as fast the plainest.

    What a resident model waits for the host is left out of the comparison: a streamed one waits too, and nobody has
    measured how long.
    """
    known = [option.estimate.seconds for option in options if option.estimate.seconds is not None]
    is_timed = len(known) == len(options)
    tick = SPARE_SHARE * min(known, default=1.0)

    def cost(option: Option) -> tuple[int, bool, int, bool, bool, int, int]:
        memory, estimate = option.memory, option.estimate
        is_resident = memory.mode == "resident"
        seconds = estimate.seconds or 0.0
        if is_resident:
            seconds = (1 - RESIDENT_MARGIN) * (estimate.compute_seconds or 0.0)
        more_or_fewer = abs(memory.max_gpu_blocks - SLOTS[0])
        return (
            _exactness(memory, is_timed),
            memory.max_gpu_blocks == 1,  # nothing overlaps: a last resort
            round(seconds / tick),
            not is_resident,
            memory.offload_activations,
            memory.split,
            more_or_fewer if not is_resident else memory.checkpoint_every and estimate.gpu_bytes,
        )

    best_of: dict[tuple[str, bool], Option] = {}
    for option in sorted(options, key=cost):
        saves = option.memory.offload_activations or option.memory.checkpoint_every > 0
        best_of.setdefault((option.memory.mode, saves), option)
    return sorted(best_of.values(), key=cost)


def _exactness(memory: MemoryConfig, is_timed: bool) -> int:
    if memory.mode == "resident":
        return int(memory.checkpoint_every > 0)
    place = [*MODES].index(memory.mode)  # type: ignore[arg-type]
    return 1 if place == 0 and is_timed else 2 + place
