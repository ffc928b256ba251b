"""A model that stays on the GPU, with torch's AdamW: rehearsed as it is, all blocks of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import HybridTrainerError, ModelError
from hybridtrainer.kernels.formats import Bits, resident_format, state_fields
from hybridtrainer.kernels.int8 import BLOCK
from hybridtrainer.losses import LossFunction
from hybridtrainer.memory.recompute import Keep, recompute_blocks
from hybridtrainer.memory.room import window_bytes
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.arithmetic import arithmetic
from hybridtrainer.planning.estimate import (
    PROCESS_BYTES,
    PRODUCTS_FP32_BYTES,
    WORKSPACE_BYTES,
    Estimate,
    averages_part,
)
from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.planning.offloaded import Away, let_go
from hybridtrainer.planning.pace import Pace, Work, pace_of
from hybridtrainer.planning.pieces import without_cache, without_memory
from hybridtrainer.planning.rehearsal import Spent, rehearse
from hybridtrainer.predict.averages import NO_AVERAGES, Averages

STATES = 2  # of AdamW, as large as the weights
TEMPORARIES = 1  # of its step, where it works on all weights at once
LOW_BITS: tuple[Bits, ...] = (8, 4)
WHOLE_BITS = 32
# Reserved beside what tensors take at the peak, at most a share of the activations: measured 6 to 190 MiB from 124M on,
# and 110 to 320 with products kept. Where moments of few bits leave the peak to blocks that are computed again, and not
# to the update, 154 to 640: a third of the activations or of what they are computed from, with a least and a most.
RESERVED_BYTES, RESERVED_SHARE = 96 << 20, 0.45
LOOSE_BYTES, LOOSE_SHARE, LEAST_LOOSE_BYTES = 600 << 20, 0.33, 128 << 20
PRODUCTS_BYTES = 224 << 20
WINDOWS = HybridTrainerConfig().history_windows
DISPLACED_BYTES = 80 << 20  # of a piece of the weights, while a jump is written into them


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
        probe: Its forward pass alone, without a graph, as a jump is probed.
        away: What its blocks keep in host memory.
        coded_state_bytes: Of Adam's moments in so many bits.
        int8_bytes: Parameters and buffers while a jump is probed in 8 bits.
        largest_matrix_bytes: Of the largest parameter of two dimensions, which is then read whole.
        trained_tensors: How many parameters are trained.
        matrices: Those whose moments may be coded.
        keep: What is kept of segments that are computed again; None where nothing is.
        trained: Elements of the parameters that are trained.
    """

    weight_bytes: int
    parameter_bytes: int
    trained_bytes: int
    accumulate: int
    precision: str
    spent: Spent
    probe: Spent
    away: Away
    coded_state_bytes: dict[int, int]
    int8_bytes: int
    largest_matrix_bytes: int
    trained_tensors: int
    matrices: int
    keep: Keep | None
    trained: int = 0


def rehearse_resident(
    model: nn.Module,
    memory: MemoryConfig,
    samples: int,
    context: int,
    accumulate: int = 1,
    loss: LossFunction = language_loss,
    known_probe: Spent | None = None,
) -> ResidentStep:
    """Rehearses forward and backward.

    Args:
        model: A decoder whose forward takes tokens, on any device; its weights stay in their type.
        memory: `precision`, `checkpoint_every`, `checkpoint_keep` and `offload_activations` count.
        samples: Sequences in a micro-batch.
        context: Tokens in a sequence.
        accumulate: Micro-batches in a step. From the second on, the gradients of those before are there.
        loss: What is trained with.
        known_probe: That of a rehearsal with other memory settings, on which it does not depend.

    Raises:
        ModelError: if nothing is trained, or the step fails without values.
    """
    model = without_cache(without_memory(model))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("No parameter of the model is trained.", "Let some of them require gradients.")
    try:
        return _rehearse(model, memory, samples, context, accumulate, loss, known_probe)
    except HybridTrainerError:
        raise
    except Exception as error:  # of a model and a loss that may be anybody's
        raise ModelError(
            f"A step of {type(model).__name__} with sequences of {context} tokens cannot be rehearsed: {error}.",
            "Look whether the model takes sequences of that length, and give `plan` the loss that it is trained with: "
            f"it gets tokens of ({samples}, {context + 1}) that have no values.",
        ) from error


def largest_keep(memory: MemoryConfig) -> Keep:
    """What is kept in the steps that keep the most."""
    return "inputs" if memory.checkpoint_keep == "inputs" else "products"


def _rehearse(
    model: nn.Module, memory: MemoryConfig, samples: int, context: int, accumulate: int, loss: LossFunction,
    known_probe: Spent | None,
) -> ResidentStep:  # fmt: skip
    is_16_bit = all(parameter.dtype.itemsize == 2 for parameter in model.parameters())
    precision = "fp32" if is_16_bit else memory.precision  # nothing to cast
    probe = known_probe or _rehearse_probe(model, precision, samples, context, loss)
    recompute_blocks(model, memory.checkpoint_every, largest_keep(memory))
    away = let_go(model) if memory.offload_activations else Away()
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
        "bf16" if is_16_bit else precision,
        _rehearse_step(model, precision, samples, context, loss, present),
        probe,
        away,
        {bits: _coded_bytes(model, bits) for bits in LOW_BITS},
        _int8_bytes(model),
        max((each.nbytes for each in model.parameters() if each.dim() == 2), default=0),
        sum(each.requires_grad for each in model.parameters()),
        sum(each.requires_grad and each.dim() == 2 for each in model.parameters()),
        largest_keep(memory) if memory.checkpoint_every else None,
        sum(each.numel() for each in model.parameters() if each.requires_grad),
    )


def estimate_resident(
    step: ResidentStep,
    hardware: Hardware | None = None,
    states: int = STATES,
    memory: MemoryConfig = MemoryConfig(),  # noqa: B008  # immutable
    averages: Averages = NO_AVERAGES,
    windows: int | None = WINDOWS,
) -> Estimate:
    """What a step takes; seconds where the machine's speeds are known and products are in 16 bits.

    Args:
        states: Tensors as large as the weights that the optimizer keeps beside them.
        memory: `optimizer_bits`, `predict_int8` and `predict_states` count.
        averages: Of the weights, which stay beside them too.
        windows: That are kept where jumps are made; None where there are none.
    """
    trained = step.trained_bytes
    peak = step.spent.peak_bytes + step.away.on_the_way_bytes + (trained if step.accumulate > 1 else 0)
    is_coded = memory.optimizer_bits != WHOLE_BITS
    state_bytes = states * trained
    if is_coded:
        state_bytes += step.coded_state_bytes[memory.optimizer_bits] - STATES * trained
    found = components(step.weight_bytes, trained, state_bytes, peak, 0 if is_coded else TEMPORARIES)
    found["fragments"] = _fragments(max(found["activations"], step.spent.kept_bytes), step.keep, is_coded)
    found |= averages_part(averages.device_bytes)
    pace: Pace | None = None
    if hardware is not None and step.precision != "fp32":
        coded = step.matrices if is_coded else 0
        work = Work(step.spent, step.accumulate, trained, step.trained_tensors, coded, step.away, step.keep)
        pace = pace_of(work, hardware)
    process = PROCESS_BYTES + (PRODUCTS_FP32_BYTES if step.precision == "fp32" else 0)
    host = {"process": process} | ({"activations": step.away.host_bytes} if step.away.nbytes else {})
    predict_bytes = _predict_bytes(step, state_bytes, memory) + averages.device_bytes
    disk_bytes = step.weight_bytes + state_bytes + averages.saved_bytes
    jump_bytes = (0, 0)
    if windows is not None:  # a snapshot, and one window more while it is written
        jump_bytes = disk_bytes + window_bytes(step.trained, windows + 1), window_bytes(step.trained, windows)
    seconds, compute_seconds, waits_for_host = pace or (None, None, False)
    return Estimate(found, host, disk_bytes, seconds, compute_seconds, predict_bytes, *jump_bytes, waits_for_host)


def _fragments(activations: int, keep: Keep | None, is_coded: bool) -> int:
    """Reserved beside tensors, where activations take so many bytes."""
    share = int(RESERVED_SHARE * activations)
    if is_coded and keep:
        return min(LOOSE_BYTES, max(min(LEAST_LOOSE_BYTES, share), int(LOOSE_SHARE * activations)))
    return min(PRODUCTS_BYTES if keep == "products" else RESERVED_BYTES, share)


def _predict_bytes(step: ResidentStep, state_bytes: int, memory: MemoryConfig) -> int:
    """While a jump is tried there are no gradients and no graph; it is written into the full weights, then probed."""
    probed = step.weight_bytes + step.probe.peak_bytes
    if memory.predict_int8:
        probed = step.int8_bytes + step.probe.peak_bytes + step.largest_matrix_bytes
    states = 0 if memory.predict_states == "leave" else state_bytes
    return max(probed, step.weight_bytes + DISPLACED_BYTES) + states + WORKSPACE_BYTES


def as_estimate(
    model: nn.Module, spent: Spent, state_bytes: int | None = None, averages: Averages = NO_AVERAGES
) -> Estimate:
    """What a step takes, by component.

    Args:
        model: Of the step.
        spent: On its forward and backward pass, gradients included.
        state_bytes: Of the optimizer; those of AdamW where left out.
        averages: Of the weights.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    state_bytes = STATES * trained if state_bytes is None else state_bytes
    found = components(weights + buffers, trained, state_bytes, spent.peak_bytes) | averages_part(averages.device_bytes)
    return Estimate(found, {"process": PROCESS_BYTES}, weights + state_bytes + averages.saved_bytes, None, None)


def components(
    weight_bytes: int, trained_bytes: int, state_bytes: int, peak_bytes: int, temporaries: int = TEMPORARIES
) -> dict[str, int]:
    """Bytes by component, where forward and backward take so many at their peak, gradients included.

    Args:
        temporaries: Of the update, as large as the weights.
    """
    activations = max(peak_bytes, (1 + temporaries) * trained_bytes) - trained_bytes
    return {
        "weights": weight_bytes,
        "optimizer states": state_bytes,
        "gradients": trained_bytes,
        "activations": activations,
        "workspace": WORKSPACE_BYTES,
        "fragments": min(RESERVED_BYTES, int(RESERVED_SHARE * activations)),
    }


def _rehearse_step(
    model: nn.Module, precision: str, samples: int, context: int, loss: LossFunction, present: list[Tensor]
) -> Spent:
    tokens = torch.empty(samples, context + 1, dtype=torch.long, device="meta")

    def forward() -> Tensor:
        with arithmetic(precision):
            return loss(model, tokens).mean()

    def backward(mean: Tensor) -> None:
        with arithmetic(precision):
            mean.backward()  # type: ignore[no-untyped-call]

    return rehearse(forward, [*present, tokens], backward)


def _rehearse_probe(model: nn.Module, precision: str, samples: int, context: int, loss: LossFunction) -> Spent:
    tokens = torch.empty(samples, context + 1, dtype=torch.long, device="meta")

    def probe() -> None:
        with torch.no_grad(), arithmetic(precision):
            loss(model, tokens)

    return rehearse(probe, [*model.parameters(), *model.buffers(), tokens])


def _int8_bytes(model: nn.Module) -> int:
    """As `int8_matrices` codes them: every parameter of two dimensions, with a scale in 32 bits for each block."""
    codes = sum(-(-each.numel() // BLOCK) * (BLOCK + 4) for each in model.parameters() if each.dim() == 2)
    others = [*(each for each in model.parameters() if each.dim() != 2), *model.buffers()]
    return codes + sum(each.nbytes for each in others)


def _coded_bytes(model: nn.Module, bits: Bits) -> int:
    """What Adam's moments take in so many bits."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    formats = [(resident_format(bits, parameter.shape, torch.float32), parameter.shape) for parameter in trained]
    fields = [field for kind, shape in formats for field in state_fields(kind, shape).values()]
    return sum(dtype.itemsize * length for dtype, length in fields)
