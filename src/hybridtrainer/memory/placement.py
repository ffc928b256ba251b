"""Moves the parameters of a model to where they will live: blocks into host memory, the rest onto the device.

One parameter at a time, so that the model is never there twice; each is replaced in its module by one of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hybridtrainer.blocks import Blocks
from hybridtrainer.errors import ModelError
from hybridtrainer.kernels.formats import Mode, format_for, weight_dtype
from hybridtrainer.kernels.reference import write_
from hybridtrainer.memory.arena import Arena, paged
from hybridtrainer.memory.layout import Entry, Kind, Layout, lay_out
from hybridtrainer.memory.units import Unit


def block_layouts(found: Blocks, mode: Mode, groups: Mapping[int, int]) -> list[Layout]:
    """The layout of each block: one and the same, but where some have frozen what others train.

    Args:
        groups: The parameter group of each parameter, by its id.
    """
    known: dict[tuple[Kind, ...], Layout] = {}
    layouts = []
    for block in found.modules:
        kinds = tuple(
            _kind(name, parameter, mode, groups.get(id(parameter), 0)) for name, parameter in block.named_parameters()
        )
        layouts.append(known.setdefault(kinds, lay_out(kinds)))
    return layouts


def lone_layouts(model: nn.Module, found: Blocks, mode: Mode) -> dict[str, Layout]:
    """The layout of each trainable parameter outside the blocks, by name; a shared one is there once.

    Rows of an embedding are seldom used, and one mean over them says little of any: `factored` keeps 8-bit moments
    for what is outside the blocks.
    """
    mode = "sr8" if mode == "factored" else mode
    return {
        name: lay_out([_kind(name, parameter, mode)])
        for name, parameter in model.named_parameters()
        if name in found.rest and parameter.requires_grad
    }


def host_bytes(layout: Layout, is_block: bool, deferred: bool) -> int:
    """What a unit takes of an arena: weights and gradients of blocks only, states of all."""
    weights = paged(layout.weight_bytes) if is_block else 0
    return weights * (2 if deferred else 1) + paged(layout.state_bytes)


@torch.no_grad()
def place_block(key: int, block: nn.Module, layout: Layout, arena: Arena, deferred: bool) -> Unit:
    """Moves a block into the arena."""
    weights, states = arena.take(layout.weight_bytes), arena.take(layout.state_bytes)
    gradients = arena.take(layout.weight_bytes if deferred else 0)
    parameters = []
    for entry in layout.entries:
        old = block.get_parameter(entry.name)
        new = nn.Parameter(entry.weight_view(weights.shown), requires_grad=entry.trainable)
        _store(entry, new, entry.state_views(states.shown), old)
        _replace(block, old, new)
        parameters.append(new)
    return Unit(key, layout, tuple(parameters), weights, states, gradients)


@torch.no_grad()
def place_lone(key: int, name: str, model: nn.Module, layout: Layout, arena: Arena, device: torch.device) -> Unit:
    """Moves a parameter onto the device and its state into the arena."""
    weights, states, gradients = arena.take(0), arena.take(layout.state_bytes), arena.take(0)
    (entry,) = layout.entries
    old = model.get_parameter(name)
    host = torch.zeros(entry.shape, dtype=entry.weight.dtype)
    _store(entry, host, entry.state_views(states.shown), old)
    new = nn.Parameter(host.to(device))
    _replace(model, old, new)
    return Unit(key, layout, (new,), weights, states, gradients)


@torch.no_grad()
def place_frozen(model: nn.Module, names: Sequence[str], device: torch.device, mode: Mode) -> None:
    """Moves what is not trained, parameters and buffers, onto the device, in the type that the mode computes in."""
    for name in names:
        old = model.get_parameter(name)
        if not old.requires_grad:
            kept = _frozen_dtype(old, mode)
            values = torch.zeros(old.shape, dtype=kept, device=device) if old.is_meta else old.to(device, kept)
            new = nn.Parameter(values, requires_grad=False)
            _replace(model, old, new)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def require_values(model: nn.Module) -> None:
    """Refuses a model whose buffers are on the meta device, before anything of it is moved.

    Raises:
        ModelError: parameters are filled later, but nobody knows what a buffer has held.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"The buffer `{name}` is on the meta device: what it held is lost.",
                "Build the model so that buffers are real, for example on the CPU.",
            )


def _kind(name: str, parameter: nn.Parameter, mode: Mode, group: int = 0) -> Kind:
    if parameter.is_complex() and parameter.requires_grad:
        raise ModelError(
            f"The parameter `{name}` is complex, and no mode of streaming keeps complex weights.",
            "Train real and imaginary parts, freeze it, or keep the whole model on one device.",
        )
    shape = tuple(parameter.shape)
    kept = None if parameter.requires_grad else _frozen_dtype(parameter, mode)
    return Kind(name, shape, format_for(mode, shape), parameter.requires_grad, kept, group)


def _frozen_dtype(parameter: Tensor, mode: Mode) -> torch.dtype:
    return weight_dtype(mode) if parameter.is_floating_point() else parameter.dtype


def _store(entry: Entry, weight: Tensor, states: dict[str, Tensor], values: Tensor) -> None:
    if values.is_meta:
        return  # zero until somebody fills it
    if entry.trainable:
        write_(entry.format, weight.detach().view(-1), states, values.detach().reshape(-1).float())
    else:
        weight.copy_(values)


def _replace(root: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Puts `new` wherever `old` is."""
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
