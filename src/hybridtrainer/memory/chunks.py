"""How many samples a block computes at a time, and what happens when even these do not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from hybridtrainer.memory.body import get_random, set_random

T = TypeVar("T")


class Chunks:
    """The division of a batch inside each block.

    Args:
        device: Whose memory may run out.
        split: Parts into which the samples of a batch are divided; more after memory has run out.
    """

    def __init__(self, device: torch.device, split: int) -> None:
        self.split = split
        self._device = device

    def size(self, samples: int) -> int:
        """Samples computed at a time, of a batch of so many."""
        return -(-samples // self.split)

    def attempt(self, chunk: int, divisible: bool, work: Callable[[int], T]) -> tuple[T, int]:
        """Does the work; where memory runs out, again with half the samples at a time. Returns how many that were.

        Args:
            chunk: Samples at a time to begin with.
            divisible: Whether the work may be divided further; dropout in a recomputation may not.
            work: Must leave no trace when it raises.
        """
        before = get_random(self._device)
        while True:
            try:
                return work(chunk), chunk
            except torch.OutOfMemoryError as error:
                if chunk <= 1 or not divisible:
                    error.add_note(_post_mortem(divisible))
                    raise
            set_random(self._device, before)
            chunk = (chunk + 1) // 2
            self.split *= 2
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            warnings.warn(
                f"GPU memory ran out inside a block: from here on {chunk} samples are computed at a time.", stacklevel=2
            )


def _post_mortem(divisible: bool) -> str:
    if not divisible:
        return (
            "The block draws random numbers (dropout), so it cannot be divided after the fact. Set `memory.split` so "
            "that fewer samples are computed at a time."
        )
    return (
        "One sample was computed at a time, and it did not fit. Use shorter sequences, a smaller "
        "`memory.max_gpu_blocks` (a slot less), or `memory.offload_activations = true`."
    )
