"""What a step takes where the whole model is on the GPU, with torch's AdamW: rehearsed as it is, all blocks of it."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from hybridtrainer.config import MemoryConfig
from hybridtrainer.memory.recompute import recompute_blocks
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.estimate import FRAGMENT_SHARE, PROCESS_BYTES, WORKSPACE_BYTES, Estimate
from hybridtrainer.planning.pieces import without_cache, without_memory
from hybridtrainer.planning.rehearsal import Spent, rehearse, sixteen_bit

STATES = 2  # of AdamW, as large as the weights
TEMPORARIES = 1  # of its step, where it works on all weights at once


def estimate_resident(model: nn.Module, memory: MemoryConfig, samples: int, context: int) -> Estimate:
    """What a step takes; seconds are not estimated.

    Args:
        model: A decoder whose forward takes tokens, on any device; its weights stay in their type.
        memory: `precision` and `checkpoint_every` count.
    """
    model = without_cache(without_memory(model))
    recompute_blocks(model, memory.checkpoint_every)
    return as_estimate(model, _rehearse_step(model, memory.precision, samples, context))


def as_estimate(model: nn.Module, spent: Spent, state_bytes: int | None = None) -> Estimate:
    """What a step takes, by component.

    Args:
        model: Of the step.
        spent: On its forward and backward pass, gradients included.
        state_bytes: Of the optimizer; those of AdamW where left out.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    states = STATES * trained if state_bytes is None else state_bytes
    moment = max(spent.peak_bytes, (1 + TEMPORARIES) * trained)
    activations = moment - trained
    found = {
        "weights": weights + sum(buffer.nbytes for buffer in model.buffers()),
        "optimizer states": states,
        "gradients": trained,
        "activations": activations,
        "workspace": WORKSPACE_BYTES,
        "fragments": int(FRAGMENT_SHARE * activations),
    }
    return Estimate(found, {"process": PROCESS_BYTES}, weights + states, None, None)


def _rehearse_step(model: nn.Module, precision: str, samples: int, context: int) -> Spent:
    tokens = torch.empty(samples, context + 1, dtype=torch.long, device="meta")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def step() -> None:
        with nullcontext() if dtype is None else sixteen_bit(dtype):
            language_loss(model, tokens).mean().backward()  # type: ignore[no-untyped-call]

    return rehearse(step, [*model.parameters(), *model.buffers(), tokens])
