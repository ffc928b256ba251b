"""Whether a model, an optimizer and the rest fit together. Asked once, before anything is trained."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hybridtrainer import ranks
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_conflicts import (
    PREDICT_KEYS,
    RESIDENT_KEYS,
    STREAMING_KEYS,
    keep_problem,
    set_keys,
    unread_by_predict,
)
from hybridtrainer.errors import ModelError
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.rank_checks import rank_problems, require_same_start
from hybridtrainer.replicas import unwrapped
from hybridtrainer.state import Training

OPTIMIZERS_WITHOUT_MOMENTS = (
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.ASGD,
    torch.optim.Rprop,
)


def checked_config(config: HybridTrainerConfig | None, loss_fn: Any) -> HybridTrainerConfig:
    """The settings, or the defaults.

    Raises:
        ModelError: if they are no settings, or the loss is no function.
    """
    if config is not None and not hasattr(config, "memory"):  # a dictionary, or the name of a preset
        raise ModelError(
            f"config is {_kind(config)}.", "Make one: HybridTrainerConfig(...), or HybridTrainerConfig.conservative()."
        )
    if not callable(loss_fn):
        raise ModelError(f"loss_fn is {_kind(loss_fn)}.", "Give a function of model and batch that returns the loss.")
    return config or HybridTrainerConfig()


def checked_setup(
    model: nn.Module,
    optimizer: Optimizer | None,
    scheduler: Any | None,
    scaler: GradScaler | None,
    clip_norm: float | None,
    accumulate: int,
    probe_batches: Sequence[Any] | None,
    config: HybridTrainerConfig,
) -> Training:
    """What will be trained, with a scaler where one is needed; a streamed model brings its own optimizer.

    Raises:
        ModelError: the first problem; what is merely odd is warned of.
    """
    if optimizer is None and isinstance(getattr(model, "optimizer", None), StreamedOptimizer):
        optimizer = model.optimizer  # type: ignore[assignment]

    def look() -> None:
        for what, remedy in _problems(
            model, optimizer, scheduler, scaler, clip_norm, accumulate, probe_batches, config
        ):
            raise ModelError(what, remedy)

    ranks.together("set-up", look)
    assert optimizer is not None
    require_same_start(Training(unwrapped(model), optimizer, scheduler, None), config, accumulate, clip_norm)
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    loose = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in owned
    ]
    if loose:
        warnings.warn(
            f"{len(loose)} trainable parameters are not in the optimizer and will not change: {', '.join(loose[:3])}"
            f"{', ...' if len(loose) > 3 else ''}. Freeze them with requires_grad_(False) if that is meant.",
            stacklevel=4,
        )
    if scaler is None and config.memory.precision == "fp16":
        scaler = GradScaler(next(model.parameters()).device.type)
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    return Training(unwrapped(model), optimizer, scheduler, scaler)


def _problems(
    model: nn.Module,
    optimizer: Optimizer | None,
    scheduler: Any | None,
    scaler: GradScaler | None,
    clip_norm: float | None,
    accumulate: int,
    probe_batches: Sequence[Any] | None,
    config: HybridTrainerConfig,
) -> Iterator[tuple[str, str]]:
    if not isinstance(model, nn.Module):
        yield f"The model is a {type(model).__name__}, not an nn.Module.", "Wrap it in one."
    if not isinstance(optimizer, Optimizer):
        yield (
            f"The optimizer is {_kind(optimizer)}, not a torch optimizer.",
            "Make one: torch.optim.AdamW(model.parameters()).",
        )
        return
    yield from _parameter_problems(model, optimizer)
    yield from _streaming_problems(model, optimizer, scaler, accumulate, config)
    yield from _resident_problems(model, optimizer, config)
    yield from rank_problems(model, optimizer, scaler, config)
    if isinstance(optimizer, torch.optim.LBFGS):
        yield (
            "LBFGS evaluates the loss several times in one step, which this trainer does not do.",
            "Use another optimizer.",
        )
    if scheduler is not None:
        missing = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, name)]
        if missing:
            yield (
                f"The scheduler has no {' and no '.join(missing)}, so it could not be resumed.",
                "Use a torch scheduler.",
            )
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            yield "The scheduler drives another optimizer than the one given.", "Make it with this optimizer."
    if scaler is not None and not isinstance(scaler, GradScaler):
        yield f"The scaler is {_kind(scaler)}, not a torch.amp.GradScaler.", "Make one, or leave it out."
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
        yield f"clip_norm is {clip_norm!r}.", "Give a positive number, or None for no clipping."
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        yield f"accumulate is {accumulate!r}.", "Give a whole number of at least 1."
    if probe_batches is not None and not probe_batches:
        yield "probe_batches is empty.", "Give at least one batch, or None to judge jumps on the batches that arrive."
    if config.forecaster in ("momentum", "learned") and any(each.is_complex() for each in model.parameters()):
        yield (
            f'The forecaster is "{config.forecaster}", which does not know complex weights.',
            'Set forecaster = "auto".',
        )
    if config.forecaster == "momentum" and not _keeps_momentum(optimizer):
        yield (
            f'The forecaster is "momentum", and {type(optimizer).__name__} as given keeps none.',
            'Set forecaster = "auto", or give the optimizer momentum.',
        )


def _parameter_problems(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    if any(is_lazy(parameter) for parameter in model.parameters()):
        yield "The model has parameters without a shape yet.", "Run one batch through it before making the trainer."
    if any("lr" not in group for group in optimizer.param_groups):
        yield "A group of the optimizer has no learning rate.", 'Give every group an "lr", if only 0.'
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        why = "has no parameters" if not parameters else "has only frozen parameters"
        yield f"The model {why}: there is nothing to train.", "Give it at least one trainable parameter."
    if any(parameter.is_meta for parameter in parameters):
        yield (
            "The model is on the meta device, without memory.",
            "Build it on a real device, or use `to_empty` and load weights.",
        )
    own = {id(parameter) for parameter in parameters}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in own for parameter in updated)
    if foreign:
        yield (
            f"The optimizer holds {foreign} of {len(updated)} parameters that are not the model's.",
            "Make it with model.parameters(), once the model is on its device; put extra parameters into the module.",
        )


def _streaming_problems(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None, accumulate: int, config: HybridTrainerConfig
) -> Iterator[tuple[str, str]]:
    own = getattr(model, "optimizer", None)
    if config.memory.mode == "auto":
        yield (
            'memory.mode is "auto" (or memory.vram is given alone), which only `hybridtrainer train` settles.',
            "In Python call `plan(model, vram, ram).best.memory`, and `stream` the model where its mode says so.",
        )
    if not isinstance(own, StreamedOptimizer):
        if config.memory.mode != "resident":
            yield (
                f'memory.mode is "{config.memory.mode}", and the model is not streamed.',
                "Call `stream(model, config.memory)` first, or leave the mode out.",
            )
        return
    if optimizer is not own:
        yield "The model is streamed, and the optimizer is not its own.", "Pass None, or `model.optimizer`."
    if config.memory.precision == "adaptive":
        yield 'memory.precision is "adaptive", and a streamed model\'s is fixed.', 'Use "bf16" or "fp32".'
    if scaler is not None or config.memory.precision == "fp16":
        yield (
            "A streamed model is updated within the backward pass, where a loss scaler cannot look ahead.",
            "Stream it in a bf16 mode, such as split8, without a scaler.",
        )
    if accumulate > 1 and not own.deferred:
        yield (
            f"accumulate is {accumulate}, and fused updates are made in the first backward pass.",
            'Use memory.split instead, which costs no copies, or memory.clipping = "exact".',
        )
    if config.memory.checkpoint_every:
        yield (
            f"memory.checkpoint_every is {config.memory.checkpoint_every}, and streamed blocks are always computed "
            "again.",
            "Set it to 0.",
        )
    if not config.memory.retry_smaller:
        yield (
            "memory.retry_smaller is off, and streamed blocks are always divided where they do not fit.",
            "Leave it on.",
        )


def _resident_problems(
    model: nn.Module, optimizer: Optimizer, config: HybridTrainerConfig
) -> Iterator[tuple[str, str]]:
    """Options of models that stay on their device."""
    memory = config.memory
    for key, problem in unread_by_predict(config):
        yield f"{key} {problem}", "Leave it out, or change predict."
    if isinstance(optimizer, StreamedOptimizer):
        for key in set_keys(memory, RESIDENT_KEYS):
            yield f"memory.{key} is set, and a streamed model does not read it.", "Leave it out."
        for key in set_keys(memory, ("offload_activations", *STREAMING_KEYS)) if memory.mode == "resident" else ():
            yield f"memory.{key} is set too late for a streamed model.", "Pass it to `stream`."
        return
    for key in set_keys(memory, STREAMING_KEYS) if memory.mode == "resident" else ():
        yield f"memory.{key} is set, and only a streamed model reads it.", "Pass it to `stream`, or leave it out."
    if not config.jumps_allowed():
        for key in set_keys(memory, PREDICT_KEYS):
            yield f"memory.{key} is set, and predict = {json.dumps(config.predict)} makes no jumps.", "Leave it out."
    if problem := keep_problem(memory, config.jumps_allowed()):
        yield f"memory.checkpoint_keep {problem}", 'Use "inputs", or leave it out.'
    if memory.precision == "adaptive" and any(p.requires_grad and p.itemsize < 4 for p in model.parameters()):
        yield (
            'memory.precision is "adaptive", and the model has 16-bit weights.',
            "Give it fp32 weights: model.float().",
        )
    bits = getattr(optimizer, "bits", 32)
    if memory.optimizer_bits not in (32, bits):
        yield (
            f"memory.optimizer_bits is {memory.optimizer_bits}, and {type(optimizer).__name__} keeps {bits} bits.",
            f"Make it with `hybridtrainer.memory.low_bit.LowBitAdamW(..., bits={memory.optimizer_bits})`.",
        )


def _keeps_momentum(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, OPTIMIZERS_WITHOUT_MOMENTS):
        return False
    return all(group.get("momentum", 1) != 0 for group in optimizer.param_groups)


def _kind(thing: object) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"


def checked_end(end_step: Any) -> int | None:
    """The clock at which a run ends, or None if nobody knows.

    Raises:
        ModelError: if it is no such thing.
    """
    if end_step is not None and (isinstance(end_step, bool) or not isinstance(end_step, int) or end_step < 1):
        raise ModelError(
            f"A run cannot end at step {end_step!r}.", "Give the number of its last step, or None if nobody knows."
        )
    return end_step
