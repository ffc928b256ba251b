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
from hybridtrainer.memory.guards import guard, guard_block
from hybridtrainer.memory.inputs import DeviceInputs, HostInputs
from hybridtrainer.memory.lanes import Lanes, make_lanes
from hybridtrainer.memory.loaded import follow_loads
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
from hybridtrainer.memory.stream_checks import (
    checked_device,
    checked_mode,
    groups_by_name,
    require_settings,
    with_less_memory,
)
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
    param_groups: Iterable[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
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
        param_groups: Groups of the model's parameters with `lr`, `betas`, `eps` and `weight_decay` of their own, or
            parameters, as torch's optimizers take them.
        clip_norm: Largest global gradient norm.
        seed: Of stochastic rounding.

    Raises:
        ModelError: if the model has no repeated blocks, or cannot be streamed for another reason; or if a setting is
            nonsense, or nothing would read it. The model is as it was then.
        MemoryBudgetError: if host memory does not suffice; said before any is allocated.

    >>> from hybridtrainer.models.gpt import build_gpt
    >>> model = stream(build_gpt("nano"), MemoryConfig(mode="split8"), device="cpu", lr=1e-3)
    >>> loss = model(torch.zeros(2, 8, dtype=torch.long)).float().square().mean()
    >>> loss.backward()
    >>> model.optimizer.step()
    """
    device = checked_device(device)
    mode = checked_mode(memory)
    require_settings({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, clip_norm)
    if hasattr(model, "optimizer"):
        raise ModelError("The model is streamed already, or has an attribute `optimizer`.", "Build it anew.")
    found = find_blocks(model)
    require_values(model)
    groups = groups_by_name(model, param_groups)
    deferred = memory.clipping == "exact"
    group_of = {id(model.get_parameter(name)): n for n, group in enumerate(groups) for name in group["params"]}
    layouts, lone_ones = block_layouts(found, mode, group_of), lone_layouts(model, found, mode)
    needed = sum(host_bytes(each, True, deferred) for each in layouts) + sum(
        host_bytes(each, False, deferred) for each in lone_ones.values()
    )
    arena = Arena(needed, device, size_in_bytes(memory.ram), with_less_memory(memory))
    budget = size_in_bytes(memory.vram)
    if budget is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
    blocks = [place_block(key, block, layouts[key], arena, deferred) for key, block in enumerate(found.modules)]
    lone = [
        place_lone(len(blocks) + number, name, model, each, arena, device)
        for number, (name, each) in enumerate(lone_ones.items())
    ]
    place_frozen(model, found.rest, device, mode)
    units = [*blocks, *lone]
    lanes = make_lanes(device)

    def make_engine(live_groups: list[dict[str, Any]]) -> Engine:
        return _engine(model, found.modules, units, blocks, lanes, live_groups, memory, device, clip_norm, seed)

    defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    chosen = [group | {"params": [model.get_parameter(name) for name in group["params"]]} for group in groups]
    optimizer = StreamedOptimizer(chosen, defaults, blocks, lone, make_engine, arena, memory)
    for index, block in enumerate(found.modules):
        attach(block, optimizer.engine, index)
        guard_block(block, blocks[index])
    guard(model, optimizer, device)
    model.optimizer = optimizer  # type: ignore[assignment]
    model.register_state_dict_pre_hook(lambda *_: optimizer.settle_whole())  # type: ignore[no-untyped-call]
    follow_loads(model, optimizer)
    model.register_forward_pre_hook(refuse_captured, with_kwargs=True)
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # type: ignore[union-attr]  # a cache would be filled twice
    return model


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
