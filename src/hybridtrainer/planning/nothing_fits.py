"""What is said where no way to train fits: which memory is short, what the smallest way would need, what to change."""

from __future__ import annotations

from hybridtrainer.errors import MemoryBudgetError
from hybridtrainer.planning.ranking import Option
from hybridtrainer.sizes import as_size

SAFE_SHARE = 0.95  # of the memory that a plan fills: estimates are within 5%


def nothing_fits(
    options: list[Option], vram_bytes: int, ram_bytes: int, own: int, is_one_memory: bool
) -> MemoryBudgetError:
    """What the smallest would need.

    Args:
        options: All ways to train that were looked at.
        vram_bytes: The card's memory.
        ram_bytes: Host memory that may be used.
        own: What CUDA itself takes of the card.
        is_one_memory: Whether what a GPU would hold is in host memory too, as on a CPU.
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
    return MemoryBudgetError(
        f"{as_size(vram_bytes, digits=1)} of GPU memory are too little: with `{least.memory.mode}`, "
        f"{least.memory.split} parts of a batch, inputs in host memory and {least.memory.max_gpu_blocks} slots it "
        f"needs {as_size(least.estimate.gpu_bytes / SAFE_SHARE + own, digits=1)}, {as_size(own, digits=1)} of them "
        "CUDA's own.",
        "Use shorter sequences (--seq, model.context), fewer tokens in a step (--tokens, train.batch_size), or a "
        "smaller model.",
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
