"""`stream`: puts a model's weights and optimizer states into host memory and lets its blocks pass through the device.

Nothing of the model changes but where its parameters live and what the blocks' `forward` does; names, classes and
`state_dict` stay. Embeddings, norms and head stay on the device; their optimizer states travel like the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hybridtrainer.blocks import find_blocks
from hybridtrainer.config_memory import MemoryConfig, size_in_bytes
from hybridtrainer.errors import ModelError
from hybridtrainer.memory.arena import Arena
from hybridtrainer.memory.body import Body
from hybridtrainer.memory.division import Division
from hybridtrainer.memory.engine import Engine
from hybridtrainer.memory.inputs import DeviceInputs, HostInputs
from hybridtrainer.memory.lanes import Lanes, make_lanes
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.placement import (
    block_layouts,
    host_bytes,
    lone_layouts,
    place_block,
    place_frozen,
    place_lone,
    require_values,
)
from hybridtrainer.memory.places import Home
from hybridtrainer.memory.rings import Rings, state_slots
from hybridtrainer.memory.side_ways import refuse_captured
from hybridtrainer.memory.slots import Ring
from hybridtrainer.memory.streamed_block import attach
from hybridtrainer.memory.units import Unit
from hybridtrainer.memory.updates import Updates


def stream(
    model: nn.Module,
    memory: MemoryConfig,
    device: str | torch.device = "cuda",
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    param_groups: Iterable[dict[str, Any]] | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
) -> nn.Module:
    """Makes a model trainable on a device that cannot hold it; returns the same model, with `model.optimizer`.

    Args:
        model: A decoder of repeated blocks, on the CPU or on the meta device. On the meta device nothing is allocated
            twice; its weights are zero until they are filled, see `GPT.initialize_`.
        memory: `mode` says how weights and states are kept; `vram`, `max_gpu_blocks`, `split`, `offload_activations`,
            `clipping` and `ram` how they pass.
        device: Where blocks are computed. A CPU works too, for tests.
        param_groups: Groups of the model's parameters with settings of their own, as torch's optimizers take them.
        clip_norm: Largest global gradient norm.
        seed: Of stochastic rounding.

    Raises:
        ModelError: if the model has no repeated blocks, or cannot be streamed for another reason.
        MemoryBudgetError: if host memory does not suffice; said before any is allocated.

    >>> from hybridtrainer.models.gpt import build_gpt
    >>> model = stream(build_gpt("nano"), MemoryConfig(mode="split8"), device="cpu", lr=1e-3)
    >>> loss = model(torch.zeros(2, 8, dtype=torch.long)).float().square().mean()
    >>> loss.backward()
    >>> model.optimizer.step()
    """
    device = _indexed(torch.device(device))
    if memory.mode == "resident":
        raise ModelError('`memory.mode` is "resident": nothing to stream.', 'Choose a mode, such as "split8".')
    if memory.mode == "auto":
        raise ModelError(
            '`memory.mode` is "auto" (or `memory.vram` is given alone): nothing was planned yet.',
            'Take the settings of `plan(model, vram, ram).best.memory`, or choose a mode, such as "split8".',
        )
    if hasattr(model, "optimizer"):
        raise ModelError("The model is streamed already, or has an attribute `optimizer`.", "Build it anew.")
    found = find_blocks(model)
    require_values(model)
    groups = _groups_by_name(model, param_groups)
    deferred = memory.clipping == "exact"
    group_of = {id(model.get_parameter(name)): n for n, group in enumerate(groups) for name in group["params"]}
    layouts, lone_ones = block_layouts(found, memory.mode, group_of), lone_layouts(model, found, memory.mode)
    needed = sum(host_bytes(each, True, deferred) for each in layouts) + sum(
        host_bytes(each, False, deferred) for each in lone_ones.values()
    )
    arena = Arena(needed, device, size_in_bytes(memory.ram))
    budget = size_in_bytes(memory.vram)
    if budget is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
    blocks = [place_block(key, block, layouts[key], arena, deferred) for key, block in enumerate(found.modules)]
    lone = [
        place_lone(len(blocks) + number, name, model, each, arena, device)
        for number, (name, each) in enumerate(lone_ones.items())
    ]
    place_frozen(model, found.rest, device, memory.mode)
    units = [*blocks, *lone]
    lanes = make_lanes(device)

    def make_engine(live_groups: list[dict[str, Any]]) -> Engine:
        return _engine(model, found.modules, units, blocks, lanes, live_groups, memory, device, clip_norm, seed)

    defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    chosen = [group | {"params": [model.get_parameter(name) for name in group["params"]]} for group in groups]
    optimizer = StreamedOptimizer(chosen, defaults, blocks, lone, make_engine, arena, memory)
    for index, block in enumerate(found.modules):
        attach(block, optimizer.engine, index)
    model.optimizer = optimizer  # type: ignore[assignment]
    model.register_state_dict_pre_hook(lambda *_: optimizer.settle_whole())  # type: ignore[no-untyped-call]
    # What is due must not come after what is loaded.
    model.register_load_state_dict_pre_hook(lambda *_: optimizer.settle())  # type: ignore[no-untyped-call]
    model.register_forward_pre_hook(refuse_captured, with_kwargs=True)
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # type: ignore[union-attr]  # a cache would be filled twice
    return model


def _indexed(device: torch.device) -> torch.device:
    """With its number, which some of torch's functions want."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("There is no GPU that torch can use.", 'Pass device="cpu" to try it on a CPU.')
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _engine(
    model: nn.Module,
    modules: Sequence[nn.Module],
    units: Sequence[Unit],
    blocks: Sequence[Unit],
    lanes: Lanes,
    groups: list[dict[str, Any]],
    memory: MemoryConfig,
    device: torch.device,
    clip_norm: float | None,
    seed: int,
) -> Engine:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rings = _rings(units, blocks, lanes, memory, device)
    names, division = [entry.name for entry in blocks[0].layout.entries], Division()
    return Engine(
        device,
        blocks,
        [Body(block, names, division) for block in modules],
        lanes,
        rings,
        HostInputs(lanes, device) if memory.offload_activations else DeviceInputs(),
        Updates(groups, trainable, len(units), device, clip_norm, seed),
        memory.split,
    )


def _rings(
    units: Sequence[Unit], blocks: Sequence[Unit], lanes: Lanes, memory: MemoryConfig, device: torch.device
) -> Rings:
    weight_bytes = max(unit.layout.weight_bytes for unit in blocks)
    state_homes = {
        key: Home([(run.at, unit.states.lanes[run.start : run.stop]) for run in portion.runs])
        for unit in units
        for key, portion in unit.portions.items()
    }
    sizes = {key: portion.nbytes for unit in units for key, portion in unit.portions.items()}
    count = state_slots(max(len(unit.portions) for unit in blocks), memory.max_gpu_blocks)
    slots = min(memory.max_gpu_blocks, len(blocks))
    weight_homes = {unit.key: Home([(0, unit.weights.lanes)]) for unit in blocks}
    weights = Ring(lanes, slots, weight_bytes, device, weight_homes.__getitem__)
    states = Ring(
        lanes, count, max(sizes.values(), default=0), device, state_homes.__getitem__, "states in", "states out"
    )
    gradients = None
    if memory.clipping == "exact":
        few = min(2, memory.max_gpu_blocks)
        gradient_homes = {unit.key: Home([(0, unit.gradients.lanes)]) for unit in blocks}
        gradients = Ring(lanes, few, weight_bytes, device, gradient_homes.__getitem__, "states in", "states out")
    rings = Rings(weights, states, gradients)
    rings.keep_small(sizes)
    return rings


def _groups_by_name(model: nn.Module, param_groups: Iterable[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Parameter groups with names: the parameters themselves are about to be replaced."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if param_groups is None:
        return [{"params": [name for name, parameter in model.named_parameters() if parameter.requires_grad]}]
    groups = []
    for group in param_groups:
        unknown = [parameter for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            raise ModelError(
                f"{len(unknown)} parameters of a group are not the model's.", "Take them from `model.parameters()`."
            )
        groups.append(group | {"params": [names[id(parameter)] for parameter in group["params"]]})
    named = {name for group in groups for name in group["params"]}
    missing = [n for n, parameter in model.named_parameters() if parameter.requires_grad and n not in named]
    if missing:
        raise ModelError(
            f"{len(missing)} trainable parameters are in no group: {', '.join(missing[:3])}.",
            "Name them all, or freeze them with requires_grad_(False).",
        )
    return groups
