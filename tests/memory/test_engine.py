"""Blocks pass through a small device: what is fetched when, what is updated, and what host memory has afterwards."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import pytest
import torch
from tests.memory.small import equal, loss_of, stack, stream_stack, train, weights
from torch import Tensor

from hybridtrainer.errors import ModelError, TornStepError
from hybridtrainer.memory import engine as engine_module
from hybridtrainer.memory import portions, units
from hybridtrainer.memory import stream as module
from hybridtrainer.memory.body import Body
from hybridtrainer.memory.engine import Engine
from hybridtrainer.memory.inputs import DeviceInputs
from hybridtrainer.memory.lanes import make_lanes
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.portions import divide
from hybridtrainer.memory.slots import Ring


def fetches(monkeypatch: pytest.MonkeyPatch, ring: Ring[Any]) -> list[Any]:
    """The keys that a ring fetches from here on."""
    seen: list[Any] = []
    original = ring._fetch

    def watched(key: Any, keep: Any) -> Any:
        seen.append(key)
        return original(key, keep)

    monkeypatch.setattr(ring, "_fetch", watched)
    return seen


def pin(engine: Engine, count: int) -> None:
    """Keeps the weights of so many more blocks on the device, and no states."""
    engine.keep_on_device(count * engine.rings.weights.slot_bytes)


def test_a_pass_fetches_each_block_once_and_turns_round_without_fetching_the_last_again(monkeypatch):
    model, _, engine = stream_stack()
    seen = fetches(monkeypatch, engine._weights)
    loss = loss_of(model)
    assert seen == [0, 1, 2, 3]
    loss.backward()
    assert seen == [0, 1, 2, 3, 1, 0]  # two slots: 3 and 2 were still there


def test_without_a_graph_the_first_block_is_fetched_for_the_next_pass(monkeypatch):
    model, _, engine = stream_stack()
    seen = fetches(monkeypatch, engine._weights)
    with torch.no_grad():
        first = loss_of(model)
        assert seen == [0, 1, 2, 3, 0]
        assert torch.equal(loss_of(model), first)
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_the_order_of_updates_is_learned_and_states_are_fetched_ahead(monkeypatch):
    model, optimizer, engine = stream_stack()
    seen = fetches(monkeypatch, engine._states)
    loss_of(model)
    assert seen == []  # nothing is known of the first step
    train(model, optimizer, 1)
    assert [key for key, _ in seen] == [5, 3, 2, 1, 0, 4]  # the head, the blocks from behind, and what is before them
    del seen[:]
    loss = loss_of(model)
    engine.lanes.finish()
    assert [key for key, _ in seen] == [5, 3]  # as many as there are slots
    loss.backward()
    assert [key for key, _ in seen] == [5, 3, 2, 1, 0, 4]


@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_pinned_blocks_stay_and_change_no_number(monkeypatch, seconds):
    expected, other, _ = stream_stack()
    train(expected, other, 6)
    monkeypatch.setattr(module, "make_lanes", partial(make_lanes, delay=lambda _: time.sleep(seconds)))
    monkeypatch.setattr(module, "Ring", partial(Ring, poison=True))
    model, optimizer, engine = stream_stack(slots=1)
    train(model, optimizer, 2)
    pin(engine, 2)
    assert sorted(engine.rings.weights.pinned) == [0, 2]  # evenly spread
    train(model, optimizer, 1, first=2)
    seen = fetches(monkeypatch, engine._weights)
    train(model, optimizer, 3, first=3)
    assert not {0, 2} & set(seen)
    assert equal(weights(model), weights(expected))


@pytest.mark.parametrize("clipping", ["fused", "exact"])
@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_states_stay_where_there_is_room_and_change_no_number(monkeypatch, seconds, clipping):
    expected, other, _ = stream_stack(stack(6), clipping=clipping)
    train(expected, other, 6)
    monkeypatch.setattr(module, "make_lanes", partial(make_lanes, delay=lambda _: time.sleep(seconds)))
    monkeypatch.setattr(module, "Ring", partial(Ring, poison=True))
    model, optimizer, engine = stream_stack(stack(6), slots=1, clipping=clipping)
    train(model, optimizer, 2)
    rings = engine.rings
    # All weights but those that have a slot anyway, and the states of three blocks.
    engine.keep_on_device(5 * rings.weights.slot_bytes + 3 * rings.states.slot_bytes)
    assert (len(rings.weights.pinned), len(rings.states.pinned)) == (5, 3)
    train(model, optimizer, 2, first=2)
    seen = fetches(monkeypatch, rings.states)
    train(model, optimizer, 2, first=4)
    assert not set(rings.states.pinned) & set(seen)
    optimizer.settle()
    for mine, theirs in zip(optimizer.state.values(), other.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in ("m", "v", "step"))
    assert equal(weights(model), weights(expected))


def stream_wide(mode: str, clipping: str) -> tuple[Any, StreamedOptimizer, Engine]:
    """Blocks of a matrix of 4500 elements, which no block of codes divides."""
    torch.manual_seed(0)
    model = stack(3)
    for block in model.blocks:
        block.linear = torch.nn.Linear(60, 75)
        block.forward = partial(_wide_block, block)
    model.into, model.head = torch.nn.Linear(4, 60), torch.nn.Linear(60, 4, bias=False)
    return stream_stack(model, mode, clipping, lr=0.01)


def _wide_block(block: Any, x: Tensor) -> Tensor:
    out: Tensor = x + block.linear(x).tanh()[..., :60]
    return out


@pytest.mark.parametrize("clipping", ["fused", "exact"])
@pytest.mark.parametrize("mode", ["fp32", "split8", "sr8", "sr4", "factored"])
def test_states_that_pass_in_portions_change_no_bit(monkeypatch, mode, clipping):
    expected, other, whole = stream_wide(mode, clipping)
    train(expected, other, 5)
    assert max(len(unit.portions) for unit in whole.blocks) == 1
    monkeypatch.setattr(portions, "GRAIN_ELEMENTS", 256)
    monkeypatch.setattr(units, "divide", partial(divide, limit_bytes=4096))
    monkeypatch.setattr(module, "make_lanes", partial(make_lanes, delay=lambda _: time.sleep(0.001)))
    monkeypatch.setattr(module, "Ring", partial(Ring, poison=True))
    model, optimizer, engine = stream_wide(mode, clipping)
    assert mode == "factored" or max(len(unit.portions) for unit in engine.blocks) > 1
    train(model, optimizer, 2)
    engine.keep_on_device(3 * engine.rings.states.slot_bytes)
    train(model, optimizer, 3, first=2)
    assert equal(weights(model), weights(expected))
    for mine, theirs in zip(
        optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_block_that_runs_out_of_memory_gets_what_stays_before_it_is_divided(monkeypatch, clipping):
    expected, other, _ = stream_stack(stack(6), clipping=clipping)
    train(expected, other, 5)
    model, optimizer, engine = stream_stack(stack(6), clipping=clipping)
    train(model, optimizer, 2)
    pin(engine, 3)
    train(model, optimizer, 1, first=2)
    original, calls = Body.gradients, 0

    def hungry(self: Body, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (2, 3):
            raise torch.OutOfMemoryError("injected")
        return original(self, *args)

    monkeypatch.setattr(Body, "gradients", hungry)
    with pytest.warns(UserWarning, match="one block less stays") as told:
        train(model, optimizer, 2, first=3)
    assert len(told) == 2
    assert len(engine.rings.weights.pinned) == 1
    assert engine.chunks.split == 1
    assert equal(weights(model), weights(expected))


def test_no_more_blocks_are_pinned_than_pass_by():
    _, _, engine = stream_stack(stack(6), slots=2)
    pin(engine, 1)
    pin(engine, 99)
    assert len(engine.rings.weights.pinned) == 4
    pin(engine, 3)
    assert len(engine.rings.weights.pinned) == 4
    assert len(engine.rings.weights.slots) == 2


def test_a_pinned_block_that_somebody_writes_is_fetched_anew():
    model, optimizer, engine = stream_stack()
    pin(engine, 2)
    train(model, optimizer, 2)
    other = stack()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(other.state_dict())
    assert torch.equal(loss_of(model), loss_of(other))
    assert equal(weights(model), weights(other))


def test_states_that_somebody_writes_are_fetched_anew_also_outside_the_blocks(monkeypatch):
    # Copies home that are still under way must not overwrite them either.
    slow = partial(make_lanes, delay=lambda lane: time.sleep(0.02 * (lane == "states out")))
    monkeypatch.setattr(module, "make_lanes", slow)
    model, optimizer, _ = stream_stack()
    train(model, optimizer, 2)
    loss_of(model)  # fetches states ahead, and no backward pass follows
    for state in optimizer.state.values():
        state["m"].zero_()
        state["v"].fill_(1e30)
    before = weights(model)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    train(model, optimizer, 1, first=2)
    assert equal(weights(model), before)  # with such a second moment no weight moves


def test_a_deferred_update_is_made_when_its_block_is_next_fetched():
    model, optimizer, engine = stream_stack(clipping="exact")
    plain = stack()
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=False)
    train(model, optimizer, 1)
    train(plain, adamw, 1)
    assert all(unit.due is not None for unit in engine.blocks)
    head_is_done = torch.equal(model.head.weight, plain.head.weight)
    assert head_is_done
    with torch.no_grad():
        hidden = model.into(torch.ones(1, 4))
        model.blocks[0](hidden)
    assert [unit.due is None for unit in engine.blocks] == [True, False, False, False]
    optimizer.settle()
    assert all(unit.due is None for unit in engine.blocks)
    assert equal(weights(model), weights(plain))


def test_a_deferred_update_has_the_settings_of_its_own_step():
    model, optimizer, _ = stream_stack(clipping="exact")
    expected, other, _ = stream_stack()
    train(model, optimizer, 1)
    train(expected, other, 1)
    optimizer.param_groups[0]["lr"] = 123.0  # of the next step
    assert equal(weights(model), weights(expected))


def test_forgetting_drops_what_was_due_and_what_was_fetched():
    model, optimizer, engine = stream_stack(clipping="exact")
    before = weights(model)
    train(model, optimizer, 1)
    optimizer.forget()
    assert all(slot.holds is None for ring in (engine._weights, engine._states) for slot in ring.slots)
    blocks = {name: value for name, value in before.items() if name.startswith("blocks")}
    after = weights(model)
    assert equal({name: after[name] for name in blocks}, blocks)


def test_settling_twice_copies_nothing_the_second_time(monkeypatch):
    model, optimizer, engine = stream_stack()
    pin(engine, 2)
    train(model, optimizer, 2)
    assert engine.rings.weights._changed
    optimizer.settle()
    monkeypatch.setattr(engine.lanes, "submit", lambda *_: pytest.fail("something was copied"))
    monkeypatch.setattr(engine.lanes, "finish", lambda: pytest.fail("something was waited for"))
    optimizer.settle()


def test_a_second_backward_pass_in_a_fused_step_is_refused_and_a_deferred_one_is_summed():
    model, optimizer, _ = stream_stack()
    loss_of(model).backward()
    with pytest.raises(ModelError, match="second backward pass"):
        loss_of(model).backward()
    model, optimizer, _ = stream_stack(clipping="exact")
    plain = stack()
    for each in (model, plain):
        loss_of(each, 1).backward()
        loss_of(each, 2).backward()
    optimizer.step()
    torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=False).step()
    assert equal(weights(model), weights(plain))


def test_no_gradient_of_a_block_stays():
    for clipping in ("fused", "exact"):
        model, _, engine = stream_stack(clipping=clipping)
        loss_of(model).backward()
        assert all(parameter.grad is None for parameter in model.blocks.parameters())
        assert engine.deferred == (clipping == "exact")


def test_without_copies_the_same_computation_goes_on(monkeypatch):
    model, optimizer, engine = stream_stack()
    train(model, optimizer, 2)
    engine.stop_copies()
    assert isinstance(engine._inputs, DeviceInputs)
    monkeypatch.setattr(engine.lanes, "submit", lambda *_: pytest.fail("something was copied"))
    losses = train(model, optimizer, 3)
    assert all(torch.isfinite(torch.tensor(losses)))


@pytest.mark.parametrize("outer", ["model", "optimizer"])
def test_a_torn_model_can_be_loaded_even_if_its_update_fails_for_ever(monkeypatch, outer):
    model, optimizer, _ = stream_stack(clipping="exact")
    train(model, optimizer, 1)
    good = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, 3, first=1)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "apply_", _cosmic_ray)
        with pytest.raises(RuntimeError, match="cosmic"):
            optimizer.settle()
        with pytest.raises(TornStepError):
            optimizer.state_dict()
        if outer == "model":  # as people do: first the one, then the other
            model.load_state_dict(good[0])
            optimizer.load_state_dict(good[1])
        else:
            optimizer.load_state_dict(good[1])
            model.load_state_dict(good[0])
    assert train(model, optimizer, 3, first=1) == expected


@pytest.mark.parametrize("where", ["forward", "gradients"])
def test_a_block_that_raises_can_be_run_again(monkeypatch, where):
    from hybridtrainer.memory.body import Body

    model, _, _ = stream_stack(clipping="exact")
    expected = loss_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(Body, where, _cosmic_ray)
        with pytest.raises(RuntimeError, match="cosmic"):
            loss_of(model).backward()
    assert torch.equal(loss_of(model), expected)


def _cosmic_ray(*_: Any) -> Any:
    raise RuntimeError("a cosmic ray")


def test_an_input_without_a_gradient_still_lets_its_block_be_trained():
    model, optimizer, engine = stream_stack()
    x = torch.ones(2, 4)
    out: Tensor = model.blocks[0](x)
    out.sum().backward()
    optimizer.step()
    assert isinstance(engine, Engine)
    assert [int(unit.steps) for unit in engine.blocks] == [1, 0, 0, 0]
