"""Finds the settings with which a model fits a budget: the fastest that lose nothing, then what costs precision.

    resident, all activations kept        then with what is cheap computed again, then with whole blocks
    for each mode, most exact first       split8, sr8, sr4, factored
        for each division of the batch    fewer samples at a time: less memory for activations
            inputs on the GPU or in RAM   less memory for as many copies
                slots for blocks          fewer slots: less memory, copies wait

All are estimated; those that fit are ordered by `ranking.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, takewhile
from types import MappingProxyType
from typing import Any

from torch import nn

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig, size_in_bytes
from hybridtrainer.errors import ConfigError, ModelError, Problem
from hybridtrainer.losses import LossFunction
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.asked import mistakes
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.planning.nothing_fits import SAFE_SHARE, Batch, nothing_fits
from hybridtrainer.planning.ranking import MODES, SLOTS, Option, in_order, kind_of, ranked
from hybridtrainer.planning.rehearsals import Rehearsals
from hybridtrainer.planning.resident import LOW_BITS, STATES, WHOLE_BITS, estimate_resident
from hybridtrainer.planning.streamed import estimate_streamed
from hybridtrainer.predict.averages import Averages, averages_of
from hybridtrainer.sizes import GIB

SEGMENTS = ((0, "inputs"), (1, "products"), (1, "inputs"), (2, "inputs"), (4, "inputs"))
SHOWN_TOO_LARGE = 3
LEAST_TOKENS = 128  # in a step; nobody trains with fewer
PREDICT_KEYS = ("predict_int8", "predict_states")
REMEDY = "Give sizes such as --vram 16GB --ram 64GB --tokens 16384 --seq 2048."


@dataclass(frozen=True)
class Plan:
    """What `plan` found.

    Attributes:
        best: The one to use.
        others: The next best two.
        vram_bytes: The card's memory.
        ram_bytes: Host memory that may be used.
        context_bytes: What CUDA itself takes of the card.
        hardware: Whose speeds the seconds are of; None where there are no seconds.
        readout: Of the settings that it was made for, which averages of the weights depend on.
        remarks: What the file of the model leaves out, and what is not counted of it.
        too_large: What would have been chosen if it had fitted, the best first: why the best is not plainer.
        resident_bytes: Weights and gradients, without which no model is resident.
    """

    best: Option
    others: tuple[Option, ...]
    vram_bytes: int
    ram_bytes: int
    context_bytes: int
    parameters: int
    tokens: int
    context: int
    accumulate: int = 1
    hardware: Hardware | None = None
    readout: str = "auto"
    remarks: tuple[str, ...] = ()
    too_large: tuple[Option, ...] = ()
    resident_bytes: int = 0


def plan(
    model: nn.Module | str,
    vram: str | int,
    ram: str | int,
    *,
    tokens: int = 16384,
    context: int = 2048,
    accumulate: int = 1,
    hardware: Hardware | None = None,
    context_bytes: int | None = None,
    loss: LossFunction = language_loss,
    readout: str = "auto",
) -> Plan:
    """The fastest settings with which a decoder trains in so much memory.

    Args:
        model: A decoder of repeated blocks; a name such as "llama-7b", or a config.json of Hugging Face.
        vram: All of the card's memory, as "16GB" or in bytes; what CUDA takes of it is subtracted.
        ram: Host memory for weights, states and inputs.
        tokens: In one step, over all sequences.
        context: Tokens in one sequence.
        accumulate: Micro-batches in one step of a resident model; a streamed one divides the batch by itself.
        hardware: Speeds; without them the least memory traffic wins and no seconds are given.
        context_bytes: What CUDA itself takes of the card; as of `hardware`, or 1 GiB.
        loss: What the model is trained with, called with the model and tokens of (sequences, context + 1). A decoder
            that `language_loss` cannot take apart needs one of its own.
        readout: "auto", "last" or "averaged", as in the configuration: the averages of the weights that it keeps are
            counted, with "auto" those of `predict = "auto"`.

    Raises:
        ConfigError: for sizes that make no sense, with all of them.
        MemoryBudgetError: if nothing fits, with what would.
        ModelError: for a model that is not known or cannot be streamed.

    >>> found = plan("gpt2-124m", vram="4GB", ram="16GB", tokens=4096, context=512)
    >>> found.best.memory.mode, found.best.estimate.gpu_bytes < 4 << 30
    ('resident', True)
    """
    budgets = {"vram": vram, "ram": ram}
    wrong = mistakes(model, budgets, tokens, context, accumulate, readout, hardware, context_bytes, loss)
    if wrong:
        raise ConfigError("the plan", wrong, REMEDY)
    vram_bytes, ram_bytes = (size_in_bytes(size) or 0 if isinstance(size, str) else size for size in (vram, ram))
    rehearsals = Rehearsals(model, tokens, context, accumulate, loss)
    settings = HybridTrainerConfig.model_validate({"readout": readout})
    return choose(rehearsals, vram_bytes, ram_bytes, hardware=hardware, context_bytes=context_bytes, settings=settings)


def choose(
    rehearsals: Rehearsals,
    vram_bytes: int,
    ram_bytes: int,
    *,
    hardware: Hardware | None = None,
    context_bytes: int | None = None,
    states: int = STATES,
    settings: HybridTrainerConfig = HybridTrainerConfig(),  # noqa: B008  # immutable
    given: Mapping[str, Any] = MappingProxyType({}),
    is_allowed: Callable[[MemoryConfig], bool] = lambda _: True,
    is_one_memory: bool = False,
) -> Plan:
    """The fastest settings for a card, from rehearsals that many cards may share.

    Args:
        states: Tensors as large as the weights that a resident model's optimizer keeps.
        settings: Of the run, which say what averages of the weights are kept; those of memory do not count.
        given: Settings of `MemoryConfig` that are not to be chosen, by name.
        is_allowed: Whether settings may be used at all.
        is_one_memory: Whether what a GPU would hold is in host memory too, as on a CPU.

    Raises:
        MemoryBudgetError: if nothing fits, with what would.
    """
    own = context_bytes if context_bytes is not None else hardware.context_bytes if hardware else GIB
    room = vram_bytes - own
    usable = None if is_one_memory else vram_bytes
    staying, passing = (averages_of(rehearsals.model, settings, usable, is_streamed=each) for each in (False, True))
    windows = settings.history_windows if settings.jumps_allowed() else None

    def ways(tried: Rehearsals) -> list[Option]:
        resident = _resident(tried, room, states, hardware, given, staying, windows)
        streamed = _streamed(tried, room, hardware, given, passing)
        return [each for each in (*resident, *streamed) if is_allowed(each.memory)]

    def fits(option: Option) -> bool:
        estimate = option.estimate
        taken = estimate.host_bytes + (estimate.gpu_bytes if is_one_memory else 0)
        return estimate.gpu_bytes <= SAFE_SHARE * room and taken <= ram_bytes

    options = ways(rehearsals)
    fitting = [each for each in options if fits(each)]
    if not options and given and 2 * rehearsals.trained_bytes <= room:
        keys = ", ".join(f"memory.{key}" for key in given)
        raise ConfigError("the settings", [Problem(keys, "leave no way to train together")], "Leave some of them out.")
    if not fitting:
        smaller = partial(_smaller_batch, rehearsals, lambda tried: any(map(fits, ways(tried))))
        raise nothing_fits(options, vram_bytes, ram_bytes, own, is_one_memory, smaller)
    best, *others = ranked(fitting)
    return Plan(
        best,
        tuple(others[:2]),
        vram_bytes,
        ram_bytes,
        own,
        rehearsals.parameters,
        rehearsals.tokens,
        rehearsals.context,
        rehearsals.accumulate,
        hardware,
        settings.readout,
        rehearsals.remarks,
        _too_large(options, best, fits),
        2 * rehearsals.trained_bytes,
    )


def _too_large(options: list[Option], best: Option, fits: Callable[[Option], bool]) -> tuple[Option, ...]:
    """What would have come before the best, one of each kind."""
    before = takewhile(lambda each: each is not best, in_order(options))
    kinds: dict[Hashable, Option] = {}
    for each in before:
        if not fits(each):
            kinds.setdefault(kind_of(each), each)
    return tuple(kinds.values())[:SHOWN_TOO_LARGE]


def _smaller_batch(rehearsals: Rehearsals, fits: Callable[[Rehearsals], bool]) -> Batch | None:
    """The largest that fits of those half as large, a quarter and so on; None where none does, or none can be tried."""
    tried = [rehearsals]
    while tried[-1].tokens >= 2 * LEAST_TOKENS:
        tried.append(tried[-1].halved())
    if len(tried) == 1 or not fits(tried[-1]):  # one look at the smallest spares the others where nothing helps
        return None
    found = next(each for each in tried[1:] if fits(each))
    return Batch(found.samples, found.context)


def _resident(
    rehearsals: Rehearsals, room: int, states: int, hardware: Hardware | None, given: Mapping[str, Any],
    averages: Averages, windows: int | None,
) -> Iterator[Option]:  # fmt: skip
    if 2 * rehearsals.trained_bytes > room:  # whatever becomes of states and activations
        return
    precision = given.get("precision", "bf16")
    settings = {key: given[key] for key in PREDICT_KEYS if key in given} | {"precision": precision}
    offloads, bits = (
        [given[key]] if key in given else choices
        for key, choices in (
            ("offload_activations", (False, True)),
            ("optimizer_bits", (WHOLE_BITS, *LOW_BITS) if states >= STATES else (WHOLE_BITS,)),
        )
    )
    fits = False
    for offload, (every, keep) in product(offloads, _segments(given)):
        if offload and fits:
            break  # a last resort, and a rehearsal takes a second
        kinds = ("inputs", "products") if keep == "by_phase" else (keep,)
        computed = "bf16" if precision == "adaptive" else precision
        try:
            steps = [rehearsals.resident(computed, every, kind, offload) for kind in kinds]
        except ModelError:
            if every <= 1 or "checkpoint_every" in given:
                raise
            continue  # blocks that do not pass a hidden state alone are computed again one by one
        for each in bits:
            chosen = {"checkpoint_every": every, "checkpoint_keep": keep}
            chosen |= {"offload_activations": offload, "optimizer_bits": each}
            memory = MemoryConfig.model_validate(settings | chosen)
            found = [estimate_resident(step, hardware, states, memory, averages, windows) for step in steps]
            option = Option(memory, _larger(found))
            fits = fits or (each == bits[0] and option.estimate.gpu_bytes <= SAFE_SHARE * room)
            yield option


def _segments(given: Mapping[str, Any]) -> list[tuple[int, str]]:
    """How many blocks are computed again at a time, and what is kept of them, as far as that is not given."""
    found = list(SEGMENTS)
    if "checkpoint_every" in given:
        found = [(given["checkpoint_every"], keep) for keep in ("products", "inputs")]
    if "checkpoint_keep" in given:
        found = [(every, given["checkpoint_keep"]) for every in dict.fromkeys(every for every, _ in found)]
    return [(every, keep) for every, keep in found if every or keep == "inputs"]


def _larger(estimates: Sequence[Estimate]) -> Estimate:
    """What a run of both kinds of steps takes: the memory of the larger, the time of the slower."""
    largest = max(estimates, key=lambda estimate: estimate.gpu_bytes)
    slowest = max(estimates, key=lambda estimate: estimate.seconds or 0.0)
    return replace(
        largest,
        seconds=slowest.seconds,
        compute_seconds=slowest.compute_seconds,
        waits_for_host=slowest.waits_for_host,
    )


def _streamed(
    rehearsals: Rehearsals, room: int, hardware: Hardware | None, given: Mapping[str, Any], averages: Averages
) -> Iterator[Option]:
    settings: dict[str, Any] = {"vram": f"{max(room / GIB, 0.01):.2f}GB"}
    settings |= {"clipping": given.get("clipping", "fused"), "precision": given.get("precision", "fp32")}
    settings |= {"pack_weights": given.get("pack_weights", True)}
    splits, offloads, slots = (
        [given[key]] if key in given else choices
        for key, choices in (
            ("split", rehearsals.splits()),
            ("offload_activations", (False, True)),
            ("max_gpu_blocks", SLOTS),
        )
    )
    for split, mode in product(splits, MODES):
        try:
            pieces = rehearsals.streamed(mode, split, settings["precision"])
        except ModelError:
            if split == 1 or "split" in given:
                raise
            continue  # blocks that return what is no result of each sample take a batch whole
        for offload, blocks in product(offloads, slots):
            chosen = {"mode": mode, "split": split, "offload_activations": offload, "max_gpu_blocks": blocks}
            memory = MemoryConfig.model_validate(settings | chosen)
            yield Option(memory, estimate_streamed(pieces, memory, hardware, averages=averages))
