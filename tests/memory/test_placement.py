"""Parameters moved to where they will live, each replaced by one of the same name."""

from __future__ import annotations

import pytest
import torch
from tests.memory.small import Stack, stack
from torch import Tensor, nn

from hybridtrainer.blocks import find_blocks
from hybridtrainer.kernels.reference import read
from hybridtrainer.memory.arena import Arena, paged
from hybridtrainer.memory.placement import (
    block_layouts,
    host_bytes,
    lone_layouts,
    place_block,
    place_frozen,
    place_lone,
)
from hybridtrainer.memory.units import Unit

CPU = torch.device("cpu")


def placed_block(block: nn.Module, model: nn.Module, mode: str = "fp32", deferred: bool = False) -> tuple[Unit, Arena]:
    layout = block_layouts(find_blocks(model), mode, {})[0]  # type: ignore[arg-type]
    arena = Arena(host_bytes(layout, True, deferred), CPU)
    return place_block(0, block, layout, arena, deferred), arena


def is_inside(tensor: Tensor, buffer: Tensor) -> bool:
    start = buffer.data_ptr()
    return start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= start + buffer.nbytes


@pytest.mark.parametrize("mode", ["fp32", "split8"])
def test_a_block_lives_in_the_arena_with_all_its_bits(mode):
    model = stack()
    block = model.blocks[0]
    before = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    unit, _ = placed_block(block, model, mode)
    after = dict(block.named_parameters())
    assert list(after) == list(before)
    assert tuple(after.values()) == unit.parameters
    for (entry, parameter), old in zip(unit.trainable, before.values(), strict=True):
        assert is_inside(parameter, unit.weights.shown)
        assert parameter.requires_grad and parameter.shape == old.shape
        state = entry.state_views(unit.states.shown)
        assert torch.equal(read(entry.format, parameter.detach().view(-1), state), old.view(-1))


def test_an_arena_of_the_size_that_was_said_is_used_up():
    for deferred in (False, True):
        model = stack()
        unit, arena = placed_block(model.blocks[0], model, deferred=deferred)
        with pytest.raises(ValueError, match="bytes were taken"):
            arena.take(1)
        assert len(unit.gradients.shown) == (unit.layout.weight_bytes if deferred else 0)
    layout = unit.layout
    assert host_bytes(layout, False, True) == paged(layout.state_bytes)
    assert host_bytes(layout, True, False) == paged(layout.weight_bytes) + paged(layout.state_bytes)


def test_a_parameter_tied_inside_a_block_is_replaced_everywhere():
    model = stack()
    block = model.blocks[0]
    block.again = nn.Linear(4, 4, bias=False)
    block.again.weight = block.linear.weight
    found = find_blocks(nn.ModuleList([block, _like(block)]))
    unit = place_block(0, block, block_layouts(found, "fp32", {})[0], Arena(1 << 20, CPU), False)
    assert block.again.weight is block.linear.weight
    assert block.again.weight is unit.parameters[0]
    assert len(unit.parameters) == 2


def _like(block: nn.Module) -> nn.Module:
    other = stack().blocks[1]
    other.again = nn.Linear(4, 4, bias=False)
    other.again.weight = other.linear.weight
    assert type(other) is type(block)
    return other


def test_a_parameter_tied_outside_the_blocks_is_there_once():
    model = stack(tied=True)
    found = find_blocks(model)
    layouts = lone_layouts(model, found, "split8")
    assert list(layouts) == ["into.weight"]
    old = model.into.weight.detach().clone()
    arena = Arena(host_bytes(layouts["into.weight"], False, True), CPU)
    unit = place_lone(7, "into.weight", model, layouts["into.weight"], arena, CPU)
    assert model.head.weight is model.into.weight is unit.parameters[0]
    assert (unit.key, len(unit.weights.shown), len(unit.gradients.shown)) == (7, 0, 0)
    entry = unit.layout.entries[0]
    assert entry.format == "split32"  # small ones keep their full precision
    assert torch.equal(
        read(entry.format, model.into.weight.detach().view(-1), entry.state_views(unit.states.shown)), old.view(-1)
    )


def test_equal_blocks_share_a_layout_and_others_have_their_own():
    model = stack()
    model.blocks[2].linear.bias.requires_grad_(False)
    layouts = block_layouts(find_blocks(model), "fp32", {})
    assert layouts[0] is layouts[1] is layouts[3]
    assert layouts[2] is not layouts[0]
    assert [entry.trainable for entry in layouts[2].entries] == [True, False]
    assert layouts[2].weight_bytes == layouts[0].weight_bytes  # so that one slot fits all
    assert layouts[2].state_bytes < layouts[0].state_bytes


def test_what_is_frozen_has_no_state_and_the_type_of_the_mode():
    model = stack()
    model.into.weight.requires_grad_(False)
    model.blocks[0].linear.weight.requires_grad_(False)
    model.register_parameter("table", nn.Parameter(torch.arange(5), requires_grad=False))
    found = find_blocks(model)
    assert list(lone_layouts(model, found, "split8")) == ["head.weight"]
    block, head = model.blocks[0], model.head.weight
    frozen = block.linear.weight.detach().clone()
    unit = place_block(0, block, block_layouts(found, "split8", {})[0], Arena(1 << 20, CPU), False)
    place_frozen(model, found.rest, CPU, "split8")
    assert torch.equal(block.linear.weight, frozen.bfloat16())
    assert not block.linear.weight.requires_grad
    assert [entry.name for entry, _ in unit.trainable] == ["linear.bias"]
    assert (model.into.weight.dtype, model.into.weight.requires_grad) == (torch.bfloat16, False)
    assert model.table.tolist() == list(range(5))
    assert model.head.weight is head  # trained: not this function's


def test_buffers_go_where_the_computation_is():
    model = stack()
    model.blocks[0].register_buffer("mask", torch.ones(2))
    model.register_buffer("nothing", None)
    model.blocks[1].register_buffer("positions", torch.arange(3), persistent=False)
    place_frozen(model, (), torch.device("meta"), "split8")  # a device of its own, which needs no GPU
    assert {name: buffer.device.type for name, buffer in model.named_buffers()} == {
        "blocks.0.mask": "meta", "blocks.1.positions": "meta",
    }  # fmt: skip
    assert list(model.state_dict())[-1:] != ["blocks.1.positions"]


def test_parameters_on_the_meta_device_become_zeros():
    with torch.device("meta"):
        model = Stack()
    model.head.requires_grad_(False)
    found = find_blocks(model)
    unit = place_block(0, model.blocks[0], block_layouts(found, "split8", {})[0], Arena(1 << 20, CPU), False)
    layout = lone_layouts(model, found, "split8")["into.weight"]
    place_lone(1, "into.weight", model, layout, Arena(1 << 20, CPU), CPU)
    place_frozen(model, found.rest, CPU, "split8")
    for parameter in (*unit.parameters, model.into.weight, model.head.weight):
        assert parameter.device == CPU
        assert not parameter.any()
    assert not model.head.weight.requires_grad


def test_what_is_where_it_belongs_is_not_copied():
    model = stack()
    model.into.weight.requires_grad_(False)
    model.register_buffer("mask", torch.ones(2))
    before = model.into.weight.data_ptr(), model.mask.data_ptr()
    place_frozen(model, find_blocks(model).rest, CPU, "fp32")
    assert (model.into.weight.data_ptr(), model.mask.data_ptr()) == before
