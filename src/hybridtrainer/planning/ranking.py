"""Orders ways to train that fit: precision is given up only for memory, time only for memory or precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.kernels.formats import Mode
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.resident import LOW_BITS, WHOLE_BITS

MODES: tuple[Mode, ...] = ("split8", "sr8", "sr4", "factored")
SLOTS = (3, 4, 2, 1)
RESIDENT_MARGIN = 0.3  # by which 8-bit moments must be faster, streamed or not; and a streamed model makes no jumps
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
    """The best first, one of each kind: a mode and place of the activations. Then all others, in the same order."""
    known: set[tuple[str, int, bool]] = set()
    best_of_kinds: list[Option] = []
    rest: list[Option] = []
    for option in in_order(options):
        (rest if kind_of(option) in known else best_of_kinds).append(option)
        known.add(kind_of(option))
    return best_of_kinds + rest


def kind_of(option: Option) -> tuple[str, int, bool]:
    """What its mode rounds, and whether its activations are computed again or wait elsewhere."""
    return option.memory.mode, option.memory.optimizer_bits, _saves(option.memory)


def in_order(options: Sequence[Option]) -> list[Option]:
    """The best first.

    A resident model that keeps all its activations comes first: nothing is computed twice, nothing is rounded. Then
    those with exact fp32 weights, resident (moments in 32 or 8 bits) or split8, by speed where it is known: resident
    with moments in 32 bits unless another is faster by `RESIDENT_MARGIN`. Then the modes that round more, most exact
    first; in each the fastest, and of those about as fast the plainest. Without speeds, of those that compute blocks
    again the one that takes least memory.
    """
    known = [option.estimate.seconds for option in options if option.estimate.seconds is not None]
    is_timed = len(known) == len(options)
    tick = SPARE_SHARE * min(known, default=1.0)

    def cost(option: Option) -> tuple[int, bool, int, bool, bool, int, int]:
        memory, estimate = option.memory, option.estimate
        is_resident = memory.mode == "resident"
        seconds = estimate.seconds or 0.0
        if is_resident and memory.optimizer_bits == WHOLE_BITS:
            seconds *= 1 - RESIDENT_MARGIN
        more_or_fewer = abs(memory.max_gpu_blocks - SLOTS[0])
        return (
            _exactness(memory, is_timed),
            # Last resorts: with one slot nothing overlaps, and a resident model that waits for its activations was
            # slower than one that computes them again wherever it was timed.
            memory.max_gpu_blocks == 1 or (is_resident and memory.offload_activations),
            round(seconds / tick),
            not is_resident,
            memory.offload_activations,
            memory.split,
            more_or_fewer if not is_resident else estimate.gpu_bytes if _saves(memory) else 0,
        )

    return sorted(options, key=cost)


def _exactness(memory: MemoryConfig, is_timed: bool) -> int:
    """0 for what neither rounds nor computes again, 1 for what keeps exact weights, then the modes that do not."""
    if memory.mode == "resident":
        if memory.optimizer_bits == WHOLE_BITS:
            return int(_saves(memory))
        as_mode: Mode = "split8" if memory.optimizer_bits == LOW_BITS[0] else "sr4"
    else:
        assert memory.mode != "auto"
        as_mode = memory.mode
    place = MODES.index(as_mode)
    return 1 if place == 0 and is_timed else 2 + place


def _saves(memory: MemoryConfig) -> bool:
    """Whether activations are computed again or wait elsewhere."""
    return memory.offload_activations or memory.checkpoint_every > 0
