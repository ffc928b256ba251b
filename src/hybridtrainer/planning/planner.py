"""Finds the settings with which a model fits a budget: the fastest that lose nothing, then what costs precision.

    resident, all activations kept        then with blocks computed again
    for each mode, most exact first       split8, sr8, sr4, factored
        for each division of the batch    fewer samples at a time: less memory for activations
            inputs on the GPU or in RAM   less memory for as many copies
                slots for blocks          fewer slots: less memory, copies wait

All are estimated, those that fit are ordered by mode and speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from hybridtrainer.config import MemoryConfig, size_in_bytes
from hybridtrainer.errors import ConfigError, MemoryBudgetError, Problem
from hybridtrainer.kernels.formats import Mode
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.planning.pieces import rehearse_pieces, with_mode
from hybridtrainer.planning.rehearsal import Spent
from hybridtrainer.planning.resident import estimate_resident
from hybridtrainer.planning.sources import load_without_memory
from hybridtrainer.planning.streamed import estimate_streamed

MODES: tuple[Mode, ...] = ("split8", "sr8", "sr4", "factored")
CHECKPOINTS = (0, 1, 2, 4)
SLOTS = (3, 4, 2, 1)
MOST_PARTS = 64
MOST_TOKENS = 1 << 22  # a rehearsal goes through every tile of them
SPARE_SHARE = 0.02  # of a step; a plan that is so little faster is not worth more memory
SAFE_SHARE = 0.95  # of the memory that a plan fills: estimates are within 5%
GIB = 1 << 30


@dataclass(frozen=True)
class Option:
    """One way to train.

    Attributes:
        memory: The settings.
        estimate: What they take.
    """

    memory: MemoryConfig
    estimate: Estimate


@dataclass(frozen=True)
class Plan:
    """What `plan` found.

    Attributes:
        best: The one to use.
        others: The next best two.
        vram_bytes: The card's memory.
        ram_bytes: Host memory that may be used.
        context_bytes: What CUDA itself takes of the card.
    """

    best: Option
    others: tuple[Option, ...]
    vram_bytes: int
    ram_bytes: int
    context_bytes: int
    parameters: int
    tokens: int
    context: int


def plan(
    model: nn.Module | str,
    vram: str | int,
    ram: str | int,
    *,
    tokens: int = 16384,
    context: int = 2048,
    hardware: Hardware | None = None,
    context_bytes: int | None = None,
) -> Plan:
    """The fastest settings with which a decoder trains in so much memory.

    Args:
        model: A decoder whose forward takes tokens; a name such as "llama-7b", or a config.json of Hugging Face.
        vram: All of the card's memory, as "16GB" or in bytes; what CUDA takes of it is subtracted.
        ram: Host memory for weights, states and inputs.
        tokens: In one step, over all sequences.
        context: Tokens in one sequence.
        hardware: Speeds; without them the least memory traffic wins and no seconds are given.

    Raises:
        ConfigError: for sizes that make no sense.
        MemoryBudgetError: if nothing fits, with what would.
        ModelError: for a model that is not known or cannot be streamed.

    >>> found = plan("gpt2-124m", vram="4GB", ram="16GB", tokens=4096, context=512)
    >>> found.best.memory.mode, found.best.estimate.gpu_bytes < 4 << 30
    ('resident', True)
    """
    vram_bytes, ram_bytes = _in_bytes("vram", vram), _in_bytes("ram", ram)
    _check_sizes(vram_bytes, ram_bytes, tokens, context)
    if isinstance(model, str):
        model = load_without_memory(model, context)
    own = context_bytes if context_bytes is not None else hardware.context_bytes if hardware else GIB
    room = vram_bytes - own
    options = list(_options(model, room, tokens // context, context, hardware))
    fitting = [
        each
        for each in options
        if each.estimate.gpu_bytes <= SAFE_SHARE * room and each.estimate.host_bytes <= ram_bytes
    ]
    if not fitting:
        raise _nothing_fits(options, vram_bytes, ram_bytes, own)
    ranked = _ranked(fitting)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Plan(ranked[0], tuple(ranked[1:3]), vram_bytes, ram_bytes, own, parameters, tokens, context)


def _options(model: nn.Module, room: int, samples: int, context: int, hardware: Hardware | None) -> Iterator[Option]:
    for every in CHECKPOINTS:
        memory = MemoryConfig(precision="bf16", checkpoint_every=every)
        yield Option(memory, estimate_resident(model, memory, samples, context))
    limit = f"{max(room, 1) / GIB:.2f}GB"
    head: Spent | None = None
    for split in _splits(samples):
        pieces = rehearse_pieces(model, MODES[0], samples, context, split, head)
        head = pieces.head
        for mode in MODES:
            in_mode = with_mode(pieces, model, mode)
            for offload in (False, True):
                for slots in SLOTS:
                    memory = MemoryConfig(
                        mode=mode, vram=limit, split=split, offload_activations=offload, max_gpu_blocks=slots
                    )
                    yield Option(memory, estimate_streamed(in_mode, memory, hardware))


def _splits(samples: int) -> list[int]:
    """Divisions of a batch: 1, 2, 4 and so on, up to one sample at a time."""
    most = min(samples, MOST_PARTS)
    return [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]


def _ranked(options: list[Option]) -> list[Option]:
    """By mode and speed; of those that are about as fast the plainest; one for each mode and place of the inputs.

    Resident ones come first: as few blocks computed again as fit, then as little memory.
    """
    known = [option.estimate.seconds for option in options if option.estimate.seconds is not None]
    tick = SPARE_SHARE * min(known, default=1.0)

    order = ("resident", *MODES)

    def cost(option: Option) -> tuple[int, bool, int, bool, int, int]:
        memory, seconds = option.memory, option.estimate.seconds
        ticks = 0 if seconds is None else round(seconds / tick)
        more_or_fewer = abs(memory.max_gpu_blocks - SLOTS[0])
        return (
            order.index(memory.mode),
            memory.max_gpu_blocks == 1,  # nothing overlaps: a last resort
            ticks,
            memory.offload_activations,
            memory.split,
            more_or_fewer if memory.mode != "resident" else memory.checkpoint_every and option.estimate.gpu_bytes,
        )

    best_of: dict[tuple[str, bool], Option] = {}
    for option in sorted(options, key=cost):
        best_of.setdefault((option.memory.mode, option.memory.offload_activations), option)
    return sorted(best_of.values(), key=cost)


def _in_bytes(name: str, size: str | int) -> int:
    try:
        found = size_in_bytes(size) if isinstance(size, str) else size
    except ValueError as error:
        raise ConfigError("the budget", [Problem(name, str(error))], "Give a size such as 16GB.") from error
    assert found is not None
    return found


def _check_sizes(vram_bytes: int, ram_bytes: int, tokens: int, context: int) -> None:
    given = {"vram": vram_bytes, "ram": ram_bytes, "tokens": tokens, "seq": context}
    problems = [Problem(name, f"must be positive, not {value}") for name, value in given.items() if value <= 0]
    if tokens > MOST_TOKENS:
        problems.append(Problem("tokens", f"{tokens} are more than the {MOST_TOKENS} that can be planned for"))
    if not problems and tokens % context:
        problems.append(Problem("tokens", f"{tokens} are no whole sequences of {context}"))
    if problems:
        raise ConfigError("the budget", problems, "Give sizes such as --vram 8GB --tokens 16384 --seq 2048.")


def _nothing_fits(options: list[Option], vram_bytes: int, ram_bytes: int, own: int) -> MemoryBudgetError:
    """What the smallest streamed ones would need."""
    options = [each for each in options if each.memory.mode != "resident"]
    fits_host = [each for each in options if each.estimate.host_bytes <= ram_bytes]
    if not fits_host:
        least = min(options, key=lambda each: each.estimate.host_bytes)
        return MemoryBudgetError(
            f"Host memory of {ram_bytes / GIB:.1f} GiB is too little: even `{least.memory.mode}` needs "
            f"{least.estimate.host_bytes / GIB:.1f} GiB.",
            "Use a smaller model, or more host memory.",
        )
    least = min(fits_host, key=lambda each: each.estimate.gpu_bytes)
    return MemoryBudgetError(
        f"{vram_bytes / GIB:.1f} GiB of GPU memory are too little: with `{least.memory.mode}`, {least.memory.split} "
        f"parts of a batch, inputs in host memory and {least.memory.max_gpu_blocks} slots it needs "
        f"{(least.estimate.gpu_bytes / SAFE_SHARE + own) / GIB:.1f} GiB, {own / GIB:.1f} of them CUDA's own.",
        "Use shorter sequences (--seq), fewer tokens in a step (--tokens), or a smaller model.",
    )
