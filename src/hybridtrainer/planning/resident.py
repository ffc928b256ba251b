"""A model that stays on the GPU, with torch's AdamW: rehearsed as it is, all blocks of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridtrainer.config import MemoryConfig
from hybridtrainer.losses import LossFunction
from hybridtrainer.memory.recompute import recompute_blocks
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.estimate import FRAGMENT_SHARE, PROCESS_BYTES, WORKSPACE_BYTES, Estimate
from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.planning.pieces import without_cache, without_memory
from hybridtrainer.planning.rehearsal import Spent, rehearse, sixteen_bit

STATES = 2  # of AdamW, as large as the weights
TEMPORARIES = 1  # of its step, where it works on all weights at once
UPDATE_PASSES = 14 + 3  # over all weights: torch's AdamW as a rehearsal counts it, and the norm with clipping


@dataclass(frozen=True)
class ResidentStep:
    """What one step of a resident model takes.

    Attributes:
        weight_bytes: Parameters and buffers.
        parameter_bytes: Parameters alone.
        trained_bytes: Parameters that are trained.
        accumulate: Micro-batches in the step.
        precision: In which products are computed.
        spent: Forward and backward of one micro-batch.
    """

    weight_bytes: int
    parameter_bytes: int
    trained_bytes: int
    accumulate: int
    precision: str
    spent: Spent


def rehearse_resident(
    model: nn.Module,
    memory: MemoryConfig,
    samples: int,
    context: int,
    accumulate: int = 1,
    loss: LossFunction = language_loss,
) -> ResidentStep:
    """Rehearses forward and backward.

    Args:
        model: A decoder whose forward takes tokens, on any device; its weights stay in their type.
        memory: `precision` and `checkpoint_every` count.
        samples: Sequences in a micro-batch.
        context: Tokens in a sequence.
        accumulate: Micro-batches in a step. From the second on, the gradients of those before are there.
        loss: What is trained with.
    """
    model = without_cache(without_memory(model))
    recompute_blocks(model, memory.checkpoint_every)
    present: list[Tensor] = [*model.parameters(), *model.buffers()]
    if accumulate > 1:
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        present += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return ResidentStep(
        weights + sum(buffer.nbytes for buffer in model.buffers()),
        weights,
        sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad),
        accumulate,
        memory.precision,
        _rehearse_step(model, memory.precision, samples, context, loss, present),
    )


def estimate_resident(step: ResidentStep, hardware: Hardware | None = None, states: int = STATES) -> Estimate:
    """What a step takes; seconds where the machine's speeds are known and products are in 16 bits.

    Args:
        states: Tensors as large as the weights that stay beside them: of the optimizer, and of an average.
    """
    trained = step.trained_bytes
    peak = step.spent.peak_bytes + (trained if step.accumulate > 1 else 0)
    found = components(step.weight_bytes, trained, states * trained, peak)
    seconds = compute_seconds = None
    if hardware is not None and step.precision != "fp32":
        spent = step.spent
        one_pass = hardware.seconds(spent.flops, spent.other_bytes)
        update = hardware.seconds(0.0, UPDATE_PASSES * trained)
        compute_seconds = step.accumulate * one_pass + update
        seconds = step.accumulate * max(one_pass, spent.kernels * hardware.launch) + update
    disk_bytes = step.parameter_bytes + states * trained
    return Estimate(found, {"process": PROCESS_BYTES}, disk_bytes, seconds, compute_seconds)


def as_estimate(model: nn.Module, spent: Spent, state_bytes: int | None = None) -> Estimate:
    """What a step takes, by component.

    Args:
        model: Of the step.
        spent: On its forward and backward pass, gradients included.
        state_bytes: Of the optimizer; those of AdamW where left out.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    state_bytes = STATES * trained if state_bytes is None else state_bytes
    found = components(weights + buffers, trained, state_bytes, spent.peak_bytes)
    return Estimate(found, {"process": PROCESS_BYTES}, weights + state_bytes, None, None)


def components(weight_bytes: int, trained_bytes: int, state_bytes: int, peak_bytes: int) -> dict[str, int]:
    """Bytes by component, where forward and backward take so many at their peak, gradients included."""
    activations = max(peak_bytes, (1 + TEMPORARIES) * trained_bytes) - trained_bytes
    return {
        "weights": weight_bytes,
        "optimizer states": state_bytes,
        "gradients": trained_bytes,
        "activations": activations,
        "workspace": WORKSPACE_BYTES,
        "fragments": int(FRAGMENT_SHARE * activations),
    }


def _rehearse_step(
    model: nn.Module, precision: str, samples: int, context: int, loss: LossFunction, present: list[Tensor]
) -> Spent:
    tokens = torch.empty(samples, context + 1, dtype=torch.long, device="meta")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)

    def step() -> None:
        with nullcontext() if dtype is None else sixteen_bit(dtype):
            loss(model, tokens).mean().backward()  # type: ignore[no-untyped-call]

    return rehearse(step, [*present, tokens])
