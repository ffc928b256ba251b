"""What is said where no way to train fits: which memory is short, what the smallest way would need, what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hybridtrainer.errors import MemoryBudgetError
from hybridtrainer.planning.ranking import Option
from hybridtrainer.sizes import as_size

SAFE_SHARE = 0.95  # of the memory that a plan fills: estimates are within 5%


class Batch(NamedTuple):
    """Of one step: sequences, and tokens in each."""

    samples: int
    context: int


def nothing_fits(
    options: list[Option],
    vram_bytes: int,
    ram_bytes: int,
    own: int,
    is_one_memory: bool,
    smaller: Callable[[], Batch | None] = lambda: None,
) -> MemoryBudgetError:
    """What the smallest would need, and what to change.

    Args:
        options: All ways to train that were looked at.
        vram_bytes: The card's memory.
        ram_bytes: Host memory that may be used.
        own: What CUDA itself takes of the card.
        is_one_memory: Whether what a GPU would hold is in host memory too, as on a CPU.
        smaller: Looks for a smaller batch that would fit; asked where the batch may be what is too large.
    """
    if own >= vram_bytes:
        return MemoryBudgetError(
            f"{as_size(vram_bytes)} of GPU memory are too little for any model: CUDA itself takes {as_size(own)}.",
            "Give more (--vram, memory.vram), or take another card.",
        )
    within = [each for each in options if each.estimate.gpu_bytes <= SAFE_SHARE * (vram_bytes - own)]
    if is_one_memory and within:
        return _no_host_room(within, ram_bytes)
    streamed = [each for each in options if each.memory.mode != "resident"]
    if not streamed:
        return _not_resident(options, vram_bytes, own)
    fits_host = [each for each in streamed if each.estimate.host_bytes <= ram_bytes]
    if not fits_host:
        least = min(streamed, key=lambda each: each.estimate.host_bytes)
        averaged = ' readout = "last",' if "averages" in least.estimate.host else ""
        return MemoryBudgetError(
            f"Host memory of {as_size(ram_bytes, digits=1)} is too little: even `{least.memory.mode}` needs "
            f"{as_size(least.estimate.host_bytes, digits=1)}.",
            f"Use a smaller model,{averaged} or more host memory.",
        )
    least = min(fits_host, key=lambda each: each.estimate.gpu_bytes)
    memory, needed = least.memory, least.estimate.gpu_bytes / SAFE_SHARE + own
    place = "in host memory" if memory.offload_activations else "on it"
    return MemoryBudgetError(
        f"{as_size(vram_bytes, digits=1)} of GPU memory are too little: with `{memory.mode}`, "
        f"{_number(memory.split, 'part')} of a batch, inputs {place} and "
        f"{_number(memory.max_gpu_blocks, 'slot')} it needs {as_size(needed, digits=1)}, {as_size(own, digits=1)} of "
        "them CUDA's own.",
        _smaller_batch(smaller()),
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _smaller_batch(found: Batch | None) -> str:
    if found is None:
        return "No batch is small enough: use a smaller model, or a card with more memory."
    return (
        f"It fits with {_number(found.samples, 'sequence')} of {found.context} tokens in a step: --seq {found.context} "
        f"--tokens {found.samples * found.context}, or model.context = {found.context} with train.batch_size = "
        f"{found.samples}. Or use a smaller model, or a card with more memory."
    )


def _no_host_room(options: list[Option], ram_bytes: int) -> MemoryBudgetError:
    """On a CPU, where a budget of GPU memory would do."""
    least = min((each.estimate for each in options), key=lambda each: each.host_bytes + each.gpu_bytes)
    averaged = ' readout = "last",' if "averages" in {*least.host, *least.gpu} else ""
    return MemoryBudgetError(
        f"Host memory of {as_size(ram_bytes)} is too little: on a CPU it holds what a GPU would hold too, and the run "
        f"needs {as_size(least.host_bytes + least.gpu_bytes)}, {as_size(least.host.get('process', 0))} of them for the "
        "process itself.",
        f"Allow more (memory.ram, where that is the limit), use a smaller train.batch_size, a smaller model,{averaged} "
        "or a machine with a GPU.",
    )


def _not_resident(options: list[Option], vram_bytes: int, own: int) -> MemoryBudgetError:
    """Other settings of the run keep the model from being streamed."""
    needed = min((each.estimate.gpu_bytes / SAFE_SHARE + own for each in options), default=None)
    told = (
        "weights, gradients and optimizer states alone are more"
        if needed is None
        else f"it needs {as_size(needed, digits=1)}"
    )
    return MemoryBudgetError(
        f"{as_size(vram_bytes, digits=1)} of GPU memory are too little for a resident model: {told}.",
        'A streamed one takes less; it needs optimizer.name = "adamw", train.accumulate = 1 (with as '
        "much more train.batch_size), no memory.checkpoint_every and memory.optimizer_bits = 32.",
    )
