"""What a user can do when GPU memory has run out and nothing smaller can be tried: remedies, each with its price.

The error itself reaches the user as torch has raised it; what is said here is a note below it. Prices are those of a
7B on an H200, see "Streaming" in docs/LOG.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

BEGINNING = "Out of GPU memory "
OFFLOAD = "`memory.offload_activations = true` (block inputs wait in host RAM; 0.5% slower at 16k tokens a step)"
FEWER_SLOTS = "a smaller `memory.max_gpu_blocks` (each a block less on the GPU, and copies have less of a head start)"
SHORTER = "shorter sequences (less context to learn from) or fewer samples in a batch (less work for each copy)"

IN_AN_UPDATE = (
    f"{BEGINNING}inside an update, which cannot be made in parts: the model is between two steps until a checkpoint is "
    f"loaded. Before you load the last one: {OFFLOAD}, or {FEWER_SLOTS}."
)
ON_THE_WAY_HOME = (
    f"{BEGINNING}while the model was brought home, as before each save: nothing was saved, and the last checkpoint is "
    f"as it was. Use {OFFLOAD}, or {FEWER_SLOTS}."
)
OUTSIDE_THE_BLOCKS = (
    f"{BEGINNING}outside the blocks of a streamed model, as in its embedding, head or loss. Use `language_loss` as the "
    "loss (the logits are computed twice, a tile at a time), with a smaller `tile_tokens` if it is (smaller products, "
    f"slower below some hundred tokens); {OFFLOAD}; {FEWER_SLOTS}; or {SHORTER}."
)


def in_a_block(divisible: bool, split: int) -> str:
    """What to do when a block cannot be computed.

    Args:
        divisible: Whether one sample at a time was tried.
        split: Parts in which the batch was computed.
    """
    if not divisible:
        return (
            f"{BEGINNING}in a block that draws random numbers (dropout), so that it cannot be divided after the fact. "
            f"Set `memory.split = {2 * split}` from the start (fewer samples at a time; 2% slower for twice the parts, "
            "and dropout draws other numbers)."
        )
    return f"{BEGINNING}in a block, with one sample at a time. Use {OFFLOAD}, {FEWER_SLOTS}, or {SHORTER}."


@contextmanager
def explained(note: str) -> Iterator[None]:
    """Adds the note to an error of GPU memory, unless somebody nearer to it has said what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if not any(known.startswith(BEGINNING) for known in getattr(error, "__notes__", ())):
            error.add_note(note)
        raise
