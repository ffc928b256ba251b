"""A streamed model refuses whatever would leave its engine with other weights than the model shows."""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.memory.small import WIDTH, Block, equal, loss_of, stack, stream_stack, train, weights
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.guards import GUARDS, _guard_module


def places(model: nn.Module) -> dict[str, Any]:
    return {name: (id(each), each.data_ptr(), each.dtype) for name, each in model.named_parameters()}


MOVES: dict[str, Callable[[Any], object]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to a type": lambda model: model.to(torch.bfloat16),
    "to meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
    "type": lambda model: model.type(torch.float64),
    "clones": lambda model: model._apply(lambda each: each.clone()),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("part", ["whole", "block", "inside a block", "outside the blocks", "inside another"])
def test_what_would_move_or_store_weights_anew_is_refused_before_anything_has_changed(move, part):
    model, optimizer, _ = stream_stack()
    train(model, optimizer, 1)
    before, where = weights(model), places(model)
    parts = {
        "whole": model, "block": model.blocks[1], "inside a block": model.blocks[1].linear,
        "outside the blocks": model.head, "inside another": nn.Sequential(model),
    }  # fmt: skip
    with pytest.raises(ModelError, match="neither moved nor given another type"):
        move(parts[part])
    assert places(model) == where and equal(weights(model), before)
    expected, other, _ = stream_stack()
    train(expected, other, 1)
    assert train(model, optimizer, 3, first=1) == train(expected, other, 3, first=1)
    assert equal(weights(model), weights(expected))


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_move_that_changes_nothing_does_nothing(clipping):
    model, optimizer, _ = stream_stack(clipping=clipping)
    expected, other, _ = stream_stack(clipping=clipping)
    train(model, optimizer, 1)
    train(expected, other, 1)
    where = places(model)
    assert model.to("cpu") is model
    assert model.cpu().float().to(torch.float32).to(torch.zeros(1)) is model
    assert model.blocks[1].to("cpu") is model.blocks[1]
    assert places(model) == where
    assert train(model, optimizer, 3, first=1) == train(expected, other, 3, first=1)
    assert equal(weights(model), weights(expected))


def test_a_move_to_the_device_that_computes_leaves_host_memory_as_it_is():
    module = nn.Linear(2, 2)
    where = places(module)
    _guard_module(module, object(), torch.device("meta"))  # stands for a GPU
    assert module.to("meta") is module and places(module) == where
    with pytest.raises(ModelError, match="float32 on cpu would become float16 on meta"):
        module.to("meta", torch.float16)
    with pytest.raises(ModelError, match="float32 on cpu would be stored anew"):
        module.share_memory()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_model_on_a_gpu_may_be_sent_there_and_nowhere_else():
    from hybridtrainer.config_memory import MemoryConfig
    from hybridtrainer.memory.stream import stream

    model: Any = stream(stack(), MemoryConfig(mode="fp32"))
    where = places(model)
    assert model.cuda().to("cuda") is model and model.blocks[0].cuda() is model.blocks[0]
    for move in (model.cpu, model.head.cpu, model.half):
        with pytest.raises(ModelError, match="neither moved"):
            move()
    assert places(model) == where


@pytest.mark.parametrize("make", [copy.deepcopy, AveragedModel], ids=["deepcopy", "AveragedModel"])
def test_a_copy_that_would_train_the_original_is_refused(make):
    model, optimizer, _ = stream_stack()
    train(model, optimizer, 1)
    for part in (model, model.blocks, model.blocks[0]):
        with pytest.raises(ModelError, match=r"cannot be copied.*state_dict.*readout"):
            make(part)


def test_an_optimizer_is_not_copied_and_its_state_is():
    model, optimizer, _ = stream_stack()
    with pytest.raises(ModelError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, 2)
    again, other, _ = stream_stack()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert train(again, other, 2) == expected


@pytest.mark.parametrize("save", [pickle.dumps, lambda part: torch.save(part, io.BytesIO())], ids=["pickle", "torch"])
def test_pickling_names_what_can_be_saved(save):
    model, optimizer, _ = stream_stack()
    for part in (model, model.blocks[0], optimizer):
        with pytest.raises(ModelError, match=r"cannot be pickled.*state_dict"):
            save(part)


def test_a_copy_that_leaves_the_optimizer_out_has_no_guards_and_no_engine():
    model, optimizer, _ = stream_stack()
    plain = copy.deepcopy(model, {id(optimizer): None})
    assert not any(name in module.__dict__ for module in plain.modules() for name in GUARDS)
    assert all(name in module.__dict__ for module in model.modules() for name in GUARDS)
    plain.half()


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_block_that_is_frozen_after_it_was_streamed_is_refused_at_the_next_step(clipping):
    model, optimizer, _ = stream_stack(clipping=clipping)
    train(model, optimizer, 1)
    before = weights(model)
    model.blocks[1].requires_grad_(False)
    with torch.no_grad():
        loss_of(model)  # where nothing is trained it does no harm
    with pytest.raises(ModelError, match=r"Block 1 .* `linear.weight` was frozen.*before `stream`"):
        loss_of(model)
    assert equal(weights(model), before)
    model.blocks[1].requires_grad_(True)
    train(model, optimizer, 1)


def test_a_block_that_is_trained_after_it_was_frozen_is_refused():
    model = stack()
    model.blocks[2].requires_grad_(False)
    model, _, _ = stream_stack(model)
    model.blocks[2].linear.bias.requires_grad_(True)
    with pytest.raises(ModelError, match=r"Block 2 .* `linear.bias` was frozen and is not now"):
        loss_of(model)


class _Adapted(nn.Module):
    """A layer with one more matrix beside it, as adapters are put on."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.more = base, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.more(x)
        return out


def _replace(model: Any) -> None:
    model.blocks[0].linear.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def _remove(model: Any) -> None:
    model.blocks[0].linear.bias = None


def _add(model: Any) -> None:
    model.blocks[0].gain = nn.Parameter(torch.ones(WIDTH))


def _adapt(model: Any) -> None:
    model.blocks[0].linear = _Adapted(model.blocks[0].linear)


def _swap(model: Any) -> None:
    model.blocks[0].linear = nn.Linear(WIDTH, WIDTH)


def _hold_elsewhere(model: Any) -> None:
    model.blocks[0].other = nn.Linear(WIDTH, WIDTH)
    model.blocks[0].other._parameters.update(model.blocks[0].linear._parameters)


@pytest.mark.parametrize("change", [_replace, _remove, _add, _adapt, _swap, _hold_elsewhere])
def test_a_block_with_other_parameters_than_it_was_streamed_with_is_refused(change):
    model, _, _ = stream_stack()
    change(model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ModelError, match="Block 0 is not as it was"):
            loss_of(model)


def test_a_part_without_parameters_may_be_replaced():
    model = stack()
    for block in model.blocks:
        block.drop = nn.Dropout(0.5)
    model, optimizer, _ = stream_stack(model)
    model.blocks[0].drop = nn.Dropout(0.0)
    train(model, optimizer, 2)
    _adapt(model)
    with pytest.raises(ModelError, match=r"it has another parameter, `linear\.more\.bias`"):
        loss_of(model)


def test_weights_are_loaded_into_their_places_and_not_put_in_their_place():
    model, _, _ = stream_stack()
    where, before = places(model), weights(model)
    with pytest.raises(ModelError, match="Leave `assign` out"):
        model.load_state_dict(stack().state_dict(), assign=True)
    assert places(model) == where and equal(weights(model), before)


def test_asking_takes_microseconds():
    model, _, _ = stream_stack()
    block: Any = model.blocks[0]
    assert type(block) is Block
    held = [cell.cell_contents for cell in block.forward.__closure__ or ()]
    (placed,) = [each for each in held if hasattr(each, "require")]
    times = []
    for _ in range(1000):
        started = time.perf_counter()
        placed.require()
        times.append(time.perf_counter() - started)
    assert sorted(times)[500] < 20e-6
