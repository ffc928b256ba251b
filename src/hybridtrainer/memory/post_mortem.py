"""Where GPU memory has run out in a streamed model when nothing smaller can be tried, and what a user can do about it.

A loop of one's own gets the error as torch has raised it, with a note below it. `HybridTrainer` makes a
`GpuMemoryError` of it, see `planning/post_mortem.py`. Prices are those of a 7B on an H200, see "Streaming" in
docs/LOG.md.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn

BEGINNING = "Out of GPU memory "
FORWARD_OF_A_BLOCK = "the forward pass of a block"
BACKWARD_OF_A_BLOCK = "the backward pass of a block"
OFFLOAD = "`memory.offload_activations = true` (block inputs wait in host RAM; 0.5% slower at 16k tokens a step)"
FEWER_SLOTS = "a smaller `memory.max_gpu_blocks` (each a block less on the GPU, and copies have less of a head start)"
SHORTER = "shorter sequences (less context to learn from) or fewer samples in a batch (less work for each copy)"
ONE_AT_A_TIME = "that was one sample at a time"


@dataclass(frozen=True)
class Place:
    """Where memory ran out.

    Attributes:
        doing: What was done there.
        refusal: Why it was not divided further; empty where nobody could have divided it.
        advice: What to do, each with its price.
    """

    doing: str
    refusal: str
    advice: str

    @property
    def note(self) -> str:
        """For whoever sees the error alone."""
        why = f" ({self.refusal})" if self.refusal else ""
        return f"{BEGINNING}in {self.doing}{why}. {self.advice}"


IN_AN_UPDATE = Place(
    "an update",
    "an update cannot be made in parts: the model is between two steps until a checkpoint is loaded",
    f"Before you load the last one: {OFFLOAD}, or {FEWER_SLOTS}.",
)
ON_THE_WAY_HOME = Place(
    "the return of the model to host memory, as before each save",
    "",
    f"Nothing was saved, and the last checkpoint is as it was. Use {OFFLOAD}, or {FEWER_SLOTS}.",
)
OUTSIDE_THE_BLOCKS = Place(
    "what is outside the blocks, as embedding, head and loss are",
    "",
    "Use `language_loss` as the loss (the logits are computed twice, a tile at a time), with a smaller `tile_tokens` "
    f"if it is (smaller products, slower below some hundred tokens); {OFFLOAD}; {FEWER_SLOTS}; or {SHORTER}.",
)


def in_a_block(doing: str, divisible: bool, split: int, refusal: str = "") -> Place:
    """A block that cannot be computed.

    Args:
        doing: Which pass it was.
        divisible: Whether one sample at a time was tried.
        split: Parts in which the batch was computed.
        refusal: Why parts of the batch are no parts of the result; empty where they are.
    """
    if refusal:
        return Place(doing, f"it cannot be divided: {refusal}", f"Use {OFFLOAD}, {FEWER_SLOTS}, or {SHORTER}.")
    if not divisible:
        return Place(
            doing,
            "it draws random numbers (dropout), so that it cannot be divided after the fact",
            f"Set `memory.split = {2 * split}` from the start (fewer samples at a time; 2% slower for twice the parts, "
            "and dropout draws other numbers).",
        )
    return Place(doing, ONE_AT_A_TIME, f"Use {OFFLOAD}, {FEWER_SLOTS}, or {SHORTER}.")


@contextmanager
def explained(place: Place) -> Iterator[None]:
    """Lets an error of GPU memory know where it was raised, unless somebody nearer to it has."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        mark(error, place)
        raise


def mark(error: torch.OutOfMemoryError, place: Place) -> None:
    """Adds the place and its note to an error that has none."""
    if place_of(error) is None:
        error.place = place  # type: ignore[attr-defined]
        error.add_note(place.note)


def place_of(error: BaseException) -> Place | None:
    """Where an error of a streamed model was raised, as far as it was marked."""
    return getattr(error, "place", None)


def module_in(error: BaseException, model: nn.Module) -> str:
    """The innermost module of the model that was computing; empty where no frame of Python says so."""
    names = {id(module): name for name, module in model.named_modules()}
    owners = [_owner(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((names[owner] for owner in reversed(owners) if names.get(owner)), "")


def _owner(frame: FrameType) -> int:
    """The id of whose method a frame is."""
    values = frame.f_locals
    found = id(values.get("self"))
    if isinstance(values, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()  # a copy, before Python 3.13, that would keep every activation alive for as long as the frame
    return found
