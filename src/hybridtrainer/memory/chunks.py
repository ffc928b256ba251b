"""How many samples a block computes at a time, and what happens when even these do not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.body import set_random
from hybridtrainer.memory.post_mortem import in_a_block, mark

T = TypeVar("T")


class Chunks:
    """The division of a batch inside each block.

    Args:
        device: Whose memory may run out.
        split: Parts into which the samples of a batch are divided; more after memory has run out.
        make_room: Frees memory that only saves copies. Returns False where there is none left.
    """

    def __init__(self, device: torch.device, split: int, make_room: Callable[[], bool] = lambda: False) -> None:
        self.split = split
        self._device = device
        self._make_room = make_room

    def size(self, samples: int) -> int:
        """Samples computed at a time, of a batch of so many."""
        return -(-samples // self.split)

    def attempt(
        self, chunk: int, divisible: bool, random: Tensor, work: Callable[[int], T], doing: str
    ) -> tuple[T, int]:
        """Does the work; where memory runs out, again with more room or else with half the samples at a time.

        Returns how many samples that were. If it raises, the next batch is divided as this one was at first.

        Args:
            chunk: Samples at a time to begin with.
            divisible: Whether the work may be divided further; dropout in a recomputation may not.
            random: The state of the generators as it is; every attempt finds it so.
            work: Must leave no trace when it raises.
            doing: What it is, for whoever hears that it did not fit.
        """
        split = self.split
        ran_out: torch.OutOfMemoryError | None = None
        while True:
            try:
                done = work(chunk)
                break
            except ModelError as refusal:
                if ran_out is None:  # it was to be divided so from the start
                    raise
                mark(ran_out, in_a_block(doing, divisible, split, refusal.what.rstrip(".")))
                raise ran_out from refusal
            except torch.OutOfMemoryError as error:
                ran_out = error
                has_room = self._make_room()
                if not has_room and (chunk <= 1 or not divisible):
                    mark(error, in_a_block(doing, divisible, split))
                    raise
            set_random(self._device, random)
            if has_room:
                remedy = "one block less stays on it."
            else:
                chunk = (chunk + 1) // 2
                split *= 2
                remedy = f"from here on {chunk} {'sample is' if chunk == 1 else 'samples are'} computed at a time."
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            warnings.warn(f"GPU memory ran out inside a block: {remedy}", stacklevel=2)
        self.split = split
        return done, chunk
