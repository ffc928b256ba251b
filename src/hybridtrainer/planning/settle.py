"""`memory.mode = "auto"`: plans a run before it begins and settles what its memory settings leave out."""

from __future__ import annotations

import torch
from torch import nn

from hybridtrainer.config import RunConfig
from hybridtrainer.config_conflicts import conflicts
from hybridtrainer.config_memory import MemoryConfig, size_in_bytes
from hybridtrainer.errors import ConfigError, Problem
from hybridtrainer.losses import LossFunction
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.describe import summary
from hybridtrainer.planning.machine import free_host_bytes, gpu_at_hand
from hybridtrainer.planning.planned import planned_of
from hybridtrainer.planning.planner import choose
from hybridtrainer.planning.rehearsals import Rehearsals
from hybridtrainer.planning.speeds import speeds_at_hand
from hybridtrainer.predict.averages import averages_of
from hybridtrainer.records import Planned

BUDGETS = ("mode", "vram", "ram")


def settle_memory(
    config: RunConfig, model: nn.Module, loss: LossFunction, device: torch.device
) -> tuple[RunConfig, Planned]:
    """The same run with memory settings that fit, and what they are planned to take.

    What the configuration says beside the budgets stays as it says; `memory.vram` is the card's memory, of which CUDA's
    own is subtracted. On a CPU it is the budget alone, and no more than is free. The budget of a resident model is not
    known to its run, so that `readout` is settled too: "last", where averages would be too large beside it.

    Args:
        config: With `memory.mode = "auto"`.
        model: What will be trained, without memory.
        loss: What it will be trained with where it is resident.
        device: Where.

    Raises:
        ConfigError: if there is no budget and no GPU to take it from.
        MemoryBudgetError: if nothing fits, with what would.
    """
    memory, train = config.memory, config.train
    given = {key: getattr(memory, key) for key in memory.model_fields_set if key not in BUDGETS}
    if device.type == "cpu":
        given.setdefault("precision", "fp32")  # 16 bits are no faster there
    gpu = gpu_at_hand(device.index or 0) if device.type == "cuda" else None
    budget, free = size_in_bytes(memory.vram), free_host_bytes()
    if gpu is not None:
        budget = gpu.vram_bytes if budget is None else min(budget, gpu.vram_bytes)
    elif budget is not None:
        budget = min(budget, free)
    if not budget:
        told = "is needed: there is no GPU whose memory could be taken."
        raise ConfigError("The configuration", [Problem("memory.vram", told)], 'Give it: memory.vram = "8GB".')
    asked, hardware = size_in_bytes(memory.ram), speeds_at_hand(gpu.name) if gpu else None

    def merged(option: MemoryConfig) -> RunConfig:
        update = given if option.mode == "resident" else given | {"ram": memory.ram}
        return config.model_copy(update={"memory": option.model_copy(update=update)})

    found = choose(
        Rehearsals(
            model,
            train.batch_size * train.accumulate * config.model.context,
            config.model.context,
            train.accumulate,
            loss,
            language_loss,
        ),
        budget,
        free if asked is None else min(asked, free),
        hardware=hardware,
        context_bytes=None if gpu is not None else 0,
        states=state_tensors(config),
        settings=config,
        given=given,
        is_one_memory=device.type == "cpu",
        is_allowed=lambda option: _can_be(option, device) and not conflicts(merged(option)),
    )
    settled = merged(found.best.memory)
    in_budget, anywhere = (averages_of(model, config, usable).copies for usable in (gpu and budget, None))
    if settled.memory.mode == "resident" and in_budget < anywhere:
        settled = settled.model_copy(update={"readout": "last"})
    return settled, planned_of(found.best.estimate, hardware, gpu is not None, f"planned: {summary(found)}")


def _can_be(option: MemoryConfig, device: torch.device) -> bool:
    """On a CPU the activations of a resident model have nowhere to go."""
    return device.type != "cpu" or option.mode != "resident" or not option.offload_activations


def state_tensors(config: RunConfig) -> int:
    """Tensors as large as the weights that the optimizer keeps beside them."""
    by_name = {"adam": 2, "adamw": 2, "sgd": 1 if config.optimizer.momentum else 0, "adafactor": 0}
    return by_name[config.optimizer.name]
