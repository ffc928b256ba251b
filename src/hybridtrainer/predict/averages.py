"""How many averages of the weights a run keeps, and what they take: asked by who makes them and by who plans for them.

Makes none, and does not know how they are read out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridtrainer import ranks
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import size_in_bytes
from hybridtrainer.replicas import local
from hybridtrainer.state import Streamed, Training

DECAYS = (0.98, 0.996)  # at each step, of those among which is chosen: windows of about 50 and 250
ROOM = 0.02  # of what may be used of a GPU's memory, which those among which is chosen may take together
HOST_BYTES = 4  # in host memory for each parameter, of an average in fp32 and of weights that give way to it


class Averages(NamedTuple):
    """What a run keeps.

    Attributes:
        copies: How many averages; 0 where the last weights are read out.
        device_bytes: Where the model is, all the time.
        host_bytes: In host memory, of a streamed model: its own weights while the average is read out, too.
        saved_bytes: In a checkpoint.
    """

    copies: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    saved_bytes: int = 0


NO_AVERAGES = Averages()


def averages_of(
    model: nn.Module,
    config: HybridTrainerConfig,
    usable_bytes: int | None,
    *,
    is_streamed: bool = False,
    has_probes: bool = True,
) -> Averages:
    """What a run with these settings keeps.

    Args:
        model: Whose weights are averaged, on any device.
        config: `readout` and `predict` count.
        usable_bytes: What may be used of the memory where the model is, beside which averages that nobody asked for by
            name must be small; None where that is host memory.
        is_streamed: Whether its weights live in host memory. Bringing all of them home takes as long as a step, so that
            such a model has an average by name only, and there.
        has_probes: Whether there are held-out batches by which to choose.

    >>> model = nn.Linear(1000, 1000)
    >>> [averages_of(model, HybridTrainerConfig(), usable).device_bytes for usable in (1 << 30, 1 << 20)]
    [8008000, 0]
    """
    if config.readout == "averaged" and is_streamed:
        average = HOST_BYTES * sum(each.numel() for each in averaged_parameters(model))
        return Averages(1, 0, average + HOST_BYTES * sum(each.numel() for each in model.parameters()), average)
    one = sum(local(each).nbytes for each in (*averaged_parameters(model), *averaged_buffers(model)))
    if config.readout == "averaged":
        return Averages(1, one, 0, one)
    is_open = config.readout == "auto" and config.predict == "auto" and has_probes
    # Checkpoints of several ranks know one average, and each rank would have to choose the same.
    if not is_open or is_streamed or ranks.count() > 1:
        return NO_AVERAGES
    every = len(DECAYS) * one
    has_room = usable_bytes is None or every <= ROOM * usable_bytes
    return Averages(len(DECAYS), every, 0, every) if has_room else NO_AVERAGES


def told_place(place: float) -> str:
    """What the weights are at a place of the line through both averages, for people.

    >>> [told_place(place) for place in (-1.0, -0.5, 0.0, 0.25)][1:]
    ['an average over about 112 steps', 'an average over about 50 steps', 'averages, carried on to the present']
    """
    if place > 0:
        return "averages, carried on to the present"
    short, long = (1 / (1 - decay) for decay in DECAYS)
    return f"an average over about {short * (long / short) ** -place:.0f} steps"


def averages_here(training: Training, config: HybridTrainerConfig, has_probes: bool) -> Averages:
    """What a run keeps that has begun: its model is where it will be trained."""
    usable = usable_bytes(training.model, config.memory.vram)
    is_streamed = isinstance(training.optimizer, Streamed)
    return averages_of(training.model, config, usable, is_streamed=is_streamed, has_probes=has_probes)


def averaged_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that change: under adapters nearly all weights are frozen, and their average is what they are."""
    return [each for each in model.parameters() if each.requires_grad and each.is_floating_point()]


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """The statistics of batch norms, and whatever else may change; those of a streamed model stay as they are.

    What has no mean stays as it is: masks of infinities, bytes that stand for numbers, several elements in one place.
    """
    return [each for each in model.buffers() if each.is_floating_point() and _has_mean(each)]


def _has_mean(buffer: Tensor) -> bool:
    if buffer.layout is not torch.strided or buffer.itemsize < 2:
        return False
    is_spread = any(size > 1 and not stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return not is_spread and (buffer.is_meta or bool(buffer.isfinite().all()))


def usable_bytes(model: nn.Module, vram: str | None) -> int | None:
    """What may be used of the GPU that a model is on; None where it is on none.

    Args:
        vram: `memory.vram`.
    """
    device = next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
    if device is None:
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    usable = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(usable, size_in_bytes(vram) or usable)
