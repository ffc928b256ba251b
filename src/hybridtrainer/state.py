"""What decides the future of a training run, outside the trainer itself: captured as a tree, restored in place.

Parameters, buffers, optimizer, scheduler, scaler and random states. Checkpoints and roll-backs use the same two
functions, `capture` and `restore`, so that what one of them covers the other does too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from hybridtrainer.buffer_guard import with_extra_state
from hybridtrainer.errors import ForeignCheckpointError
from hybridtrainer.randomness import RandomState
from hybridtrainer.replicas import divided_like, is_shard, local, own_part, part_of
from hybridtrainer.tree import Tree


@runtime_checkable
class Streamed(Protocol):
    """An optimizer whose state, and whose model's weights, are on their way between host memory and a device."""

    def settle(self) -> None:
        """Brings everything home."""
        ...

    def forget(self) -> None:
        """Forgets what was brought out, because something else was written at home."""
        ...


@dataclass(frozen=True)
class Training:
    """The objects that a training step changes."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: Any | None
    scaler: GradScaler | None


def capture(training: Training, *, frozen: bool = True) -> dict[str, Tree]:
    """The state as a tree. Tensors are the live ones: copy or write them before the next step.

    Args:
        training: What to capture.
        frozen: Whether frozen parameters are in it. No step changes them, and under adapters they are nearly all.
    """
    model = training.model
    kept = [(name, each) for name, each in model.named_parameters() if frozen or each.requires_grad]
    parts = [name for name, parameter in kept if is_shard(parameter)]
    return {
        **({"sharded": parts} if parts else {}),
        "parameters": {name: local(parameter.detach()) for name, parameter in kept},
        "buffers": dict(model.named_buffers()),
        "module_extra": {name: module.get_extra_state() for name, module in with_extra_state(model)},
        "optimizer": own_part(training.optimizer.state_dict()) if parts else training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict() if training.scheduler is not None else None,
        "scaler": training.scaler.state_dict() if training.scaler is not None else None,
        "random": RandomState.capture().to_tree(),
    }


@torch.no_grad()
def restore(training: Training, tree: Mapping[str, Tree]) -> None:
    """Puts a captured state back, bit for bit, into the tensors that are there."""
    model, optimizer = training.model, training.optimizer
    if isinstance(optimizer, Streamed):
        optimizer.forget()
    _restore_parameters(model, tree["parameters"])
    for name, buffer in list(model.named_buffers()):
        _restore_buffer(model, name, buffer, tree["buffers"][name])
    for name, module in with_extra_state(model):
        module.set_extra_state(tree["module_extra"][name])
    _restore_optimizer(optimizer, tree["optimizer"])
    if training.scheduler is not None:
        training.scheduler.load_state_dict(tree["scheduler"])
    if training.scaler is not None:
        training.scaler.load_state_dict(tree["scaler"])
    RandomState.from_tree(tree["random"]).restore()


@torch.no_grad()
def restore_parameters(training: Training, tree: Mapping[str, Tree]) -> None:
    """Puts only the weights back, with those lower halves that an optimizer keeps."""
    _restore_parameters(training.model, tree["parameters"])
    if isinstance(training.optimizer, Streamed):
        for index, values in training.optimizer.state_dict()["state"].items():
            if "low" in values:
                values["low"].copy_(tree["optimizer"]["state"][index]["low"])


def _restore_parameters(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Writes them back; a frozen one that was not captured is as it was."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or name in saved:
            local(parameter).copy_(part_of(saved[name], parameter))


def signature(training: Training) -> dict[str, Tree]:
    """What must be equal for a state to fit: shapes, types and classes, no values."""
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    groups = training.optimizer.param_groups
    return {
        "parameters": {name: _describe(parameter) for name, parameter in training.model.named_parameters()},
        "buffers": sorted(name for name, _ in training.model.named_buffers()),
        "extra_state": sorted(name for name, _ in with_extra_state(training.model)),
        "optimizer": _optimizer_name(training.optimizer),
        "optimizer_groups": [[names.get(id(parameter), "?") for parameter in group["params"]] for group in groups],
        "scheduler": _scheduler_name(training.scheduler),
        "scaler": _class_name(training.scaler),
    }


def require_same(found: Mapping[str, Tree], expected: Mapping[str, Tree], origin: str) -> None:
    """Refuses a state whose signature differs.

    Raises:
        ForeignCheckpointError: naming the first few differences.
    """
    differences = list(_differences(found, expected))
    if differences:
        shown = "; ".join(differences[:4]) + (f"; and {len(differences) - 4} more" if len(differences) > 4 else "")
        raise ForeignCheckpointError(
            f"{origin} was made by another setup: {shown}. Nothing was loaded.",
            "Build the model, optimizer and scheduler as they were when it was saved.",
        )


def require_fits(saved: Mapping[str, Tree], expected: Mapping[str, Tree], training: Training, origin: str) -> None:
    """Refuses a saved state of another setup, or with optimizer states of other types than those that are here.

    Args:
        saved: The state, with its signature.
        expected: The signature that it must have.
        training: Where it would go. An optimizer that has not made a step yet has nothing to compare.
        origin: Where the state comes from.

    Raises:
        ForeignCheckpointError: naming the first few differences.
    """
    require_same(saved["signature"], expected, origin)
    optimizer = training.optimizer
    # A streamed one gives no state in the middle of a step that failed, which is when a checkpoint is loaded.
    own = Optimizer.state_dict(optimizer) if isinstance(optimizer, Streamed) else optimizer.state_dict()
    found, live = _types(saved["optimizer"]), _types(own)
    shared = [name for name in found if name in live]
    require_same({name: found[name] for name in shared}, {name: live[name] for name in shared}, origin)


def _types(optimizer_state: Tree) -> dict[str, str]:
    return {
        f"optimizer state {key} of parameter {index}": str(value.dtype).removeprefix("torch.")
        for index, values in optimizer_state["state"].items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def _restore_buffer(model: nn.Module, name: str, buffer: Tensor, saved: Tensor) -> None:
    if buffer.shape == saved.shape and buffer.dtype == saved.dtype and 0 not in buffer.stride():  # 0: expanded
        buffer.copy_(saved)
        return
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._buffers[leaf] = saved.to(buffer.device)


def _restore_optimizer(optimizer: Optimizer, saved: Tree) -> None:
    live, saved = optimizer.state_dict(), divided_like(optimizer, saved)
    if _same_layout(live, saved) and _is_live(live, optimizer):
        _copy_into(live["state"], saved["state"])
        for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            _copy_into(group, {key: value for key, value in values.items() if key != "params"})
        return
    optimizer.load_state_dict(_cloned(saved))
    # torch casts state to the type of the weights on load; moments kept in another type get their bits back.
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            original = saved["state"][index][key]
            if isinstance(value, Tensor) and value.dtype != original.dtype:
                values[key] = original.to(value.device, copy=True)


def _same_layout(live: Tree, saved: Tree) -> bool:
    """Whether two optimizer states hold the same tensors under the same keys, and nothing but the usual parts."""
    if set(live) != {"state", "param_groups"} or set(saved) != set(live):
        return False
    return bool(_layout(live["state"]) == _layout(saved["state"]))


def _is_live(state: Tree, optimizer: Optimizer) -> bool:
    """Whether writing into a state dictionary reaches the optimizer; some return copies."""
    held = {id(value) for values in optimizer.state.values() for value in values.values()}
    shown = [value for values in state["state"].values() for value in values.values()]
    return all(id(value) in held for value in shown if isinstance(value, Tensor))


def _layout(tree: Tree) -> Tree:
    if isinstance(tree, Mapping):
        return {key: _layout(value) for key, value in tree.items()}
    return (tree.shape, tree.dtype) if isinstance(tree, Tensor) else None


def _copy_into(live: Any, saved: Mapping[Any, Tree]) -> None:
    for key, value in saved.items():
        if isinstance(value, Mapping):
            _copy_into(live[key], value)
        elif isinstance(value, Tensor) and isinstance(live.get(key), Tensor):
            live[key].copy_(value)
        else:
            live[key] = _cloned(value)


def _cloned(tree: Tree) -> Tree:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, Mapping):
        return {key: _cloned(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_cloned(value) for value in tree)
    return tree


def _differences(found: Tree, expected: Tree, path: str = "") -> Iterator[str]:
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in {**expected, **found}:
            where = f"{path}.{key}" if path else str(key)
            if key not in found:
                yield f"it lacks {where}"
            elif key not in expected:
                yield f"it has {where}, which is not here"
            else:
                yield from _differences(found[key], expected[key], where)
    elif found != expected:
        yield f"{path} is {_short(found)} there and {_short(expected)} here"


def _short(value: Tree) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _describe(tensor: Tensor) -> str:
    return f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"


def _optimizer_name(optimizer: Optimizer) -> str:
    """Its class, and the bits of its moments where it has a choice of them."""
    bits = getattr(optimizer, "bits", None)
    return f"{_class_name(optimizer)}" + (f" of {bits} bits" if bits else "")


def _scheduler_name(scheduler: Any | None) -> str | None:
    """Its class, and for one made of others theirs."""
    inner = getattr(scheduler, "_schedulers", None)
    name = _class_name(scheduler)
    return f"{name} of {', '.join(str(_scheduler_name(each)) for each in inner)}" if inner else name


def _class_name(thing: object | None) -> str | None:
    return None if thing is None else f"{type(thing).__module__}.{type(thing).__qualname__}"
