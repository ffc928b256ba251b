"""Whether what `stream` was given can be followed. Asked before anything of the model is moved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.config_conflicts import against_streaming
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.kernels.formats import Mode
from hybridtrainer.memory.updates import LAST_NORM

BYTES_PER_PARAMETER = {"fp32": 12, "split8": 6, "sr8": 4, "sr4": 3, "factored": 2}
SETTINGS = ("lr", "betas", "eps", "weight_decay")
NOTES = ("params", "name", "param_names", "initial_lr", "max_lr", "min_lr", LAST_NORM)  # change no update
OF_TORCH = {  # what a group of torch's own AdamW has too, and the value that asks for nothing
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip


def checked_device(device: str | torch.device) -> torch.device:
    """The device, a GPU's with its number, which some of torch's functions want.

    Raises:
        ModelError: if nothing can be computed there.
    """
    remedy = 'Choose "cuda", "cuda:1", ..., or "cpu".'
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise ModelError(f"device is {device!r}, which torch does not know.", remedy) from None
    if place.type not in ("cuda", "cpu"):
        raise ModelError(f'device is "{place}", and streamed blocks are computed on a GPU or a CPU only.', remedy)
    if place.type == "cpu":
        return place
    if not torch.cuda.is_available():
        raise ModelError("There is no GPU that torch can use.", 'Pass device="cpu" to try it on a CPU.')
    if (place.index or 0) >= torch.cuda.device_count():
        raise ModelError(f'device is "{place}", and torch finds {torch.cuda.device_count()} GPUs here.', remedy)
    return torch.device("cuda", torch.cuda.current_device()) if place.index is None else place


def checked_mode(memory: MemoryConfig) -> Mode:
    """How weights and states are kept.

    Raises:
        ModelError: if that leaves nothing to stream; or, in the words of the command line, if other settings do not go
            with it.
    """
    if not hasattr(memory, "mode"):
        raise ModelError(f"memory is a {type(memory).__name__}.", 'Make one: MemoryConfig(mode="split8").')
    if memory.mode == "resident":
        raise ModelError('`memory.mode` is "resident": nothing to stream.', 'Choose a mode, such as "split8".')
    if memory.mode == "auto":
        raise ModelError(
            '`memory.mode` is "auto" (or `memory.vram` is given alone): nothing was planned yet.',
            'Take the settings of `plan(model, vram, ram).best.memory`, or choose a mode, such as "split8".',
        )
    for problem in against_streaming(memory):
        raise ModelError(f"{problem.key} {problem.message}", problem.suggestion or "Leave it out.")
    return memory.mode


def require_settings(settings: Mapping[str, Any], clip_norm: float | None, where: str = "") -> None:
    """Refuses what AdamW cannot follow; where it is left out, it is not looked at.

    Args:
        settings: `lr`, `betas`, `eps` and `weight_decay`, as far as they are given.
        clip_norm: Largest global gradient norm.
        where: Behind the name of a setting: where it was found.

    Raises:
        ModelError: for the first that is nonsense.
    """
    for name in ("lr", "eps", "weight_decay"):
        value = settings.get(name, 0.0)
        if not (_is_number(value, may_be_tensor=name == "lr") and 0.0 <= value < math.inf):
            raise ModelError(f"{name}{where} is {value!r}.", "Give a number, finite and not below 0.")
    betas = settings.get("betas", (0.9, 0.999))
    is_pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not (is_pair and all(_is_number(beta) and 0.0 <= beta < 1.0 for beta in betas)):
        raise ModelError(f"betas{where} is {betas!r}.", "Give two numbers, not below 0 and below 1.")
    if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
        raise ModelError(f"clip_norm is {clip_norm!r}.", "Give a positive number, or None for no clipping.")


def groups_by_name(
    model: nn.Module, param_groups: Iterable[dict[str, Any]] | Iterable[nn.Parameter] | None
) -> list[dict[str, Any]]:
    """Parameter groups with names: the parameters themselves are about to be replaced.

    Raises:
        ModelError: if they are not whole, not the model's, or ask for what a streamed optimizer does not do.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        why = "has only frozen parameters" if names else "has no parameters"
        raise ModelError(f"The model {why}: there is nothing to train.", "Give it at least one trainable parameter.")
    if param_groups is None:
        return [{"params": trainable}]
    groups = []
    for number, group in enumerate(_as_groups(param_groups)):
        parameters = _parameters_of(group, number)
        unknown = [parameter for parameter in parameters if id(parameter) not in names]
        if unknown:
            raise ModelError(
                f"{len(unknown)} parameters of a group are not the model's.", "Take them from `model.parameters()`."
            )
        groups.append(group | {"params": [names[id(parameter)] for parameter in parameters]})
    named = [name for group in groups for name in group["params"]]
    _require_each_once(named, trainable)
    return groups


def with_less_memory(memory: MemoryConfig) -> str:
    """What to do where a model needs more host memory than there is."""
    fewer = [f"{mode} {n}" for mode, n in BYTES_PER_PARAMETER.items() if n < BYTES_PER_PARAMETER[memory.mode]]
    ways = [f"Choose a mode with fewer bytes per parameter: {', '.join(fewer)}."] if fewer else []
    if memory.clipping == "exact":
        ways.append('With `clipping = "fused"` no gradients wait: 2 bytes fewer (4 in fp32).')
    if not fewer:
        ways.append("Choose a smaller model, or find more memory: no mode takes less.")
    return " ".join(ways)


def _as_groups(given: Any) -> list[dict[str, Any]]:
    is_many = isinstance(given, Iterable) and not isinstance(given, Tensor | Mapping | str)
    listed = list(given) if is_many else []
    if listed and all(isinstance(each, Tensor) for each in listed):
        return [{"params": listed}]
    if not is_many or not all(isinstance(each, dict) and "params" in each for each in listed):
        raise ModelError(
            "param_groups is no list of groups, and none of parameters.",
            'Give groups such as [{"params": [...], "lr": 1e-4}], or `model.parameters()`.',
        )
    return listed


def _parameters_of(group: dict[str, Any], number: int) -> list[Any]:
    where = f" of parameter group {number}"
    require_settings(group, None, where)
    for key, value in group.items():
        if key in (*SETTINGS, *NOTES) or (key in OF_TORCH and bool(value) == bool(OF_TORCH[key])):
            continue
        raise ModelError(
            f"{key}{where} is {value!r}, and a streamed optimizer does not read it: it is AdamW with "
            f"{', '.join(SETTINGS)}.",
            "Leave it out.",
        )
    if isinstance(group["params"], set):
        raise ModelError(f"The parameters{where} are a set, whose order changes between runs.", "Give a list.")
    return [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])


def _require_each_once(named: list[str], trainable: list[str]) -> None:
    twice = sorted({name for name in named if named.count(name) > 1}) if len(set(named)) < len(named) else []
    if twice:
        raise ModelError(
            f"{len(twice)} parameters are in the groups more than once: {', '.join(twice[:3])}.", "Name each once."
        )
    present = set(named)
    missing = [name for name in trainable if name not in present]
    if missing:
        raise ModelError(
            f"{len(missing)} trainable parameters are in no group: {', '.join(missing[:3])}.",
            "Name them all, or freeze them with requires_grad_(False).",
        )


def _is_number(value: Any, may_be_tensor: bool = False) -> bool:
    return isinstance(value, Real) or (may_be_tensor and isinstance(value, Tensor) and value.numel() == 1)
