"""The optimizer of a streamed model, as schedulers, checkpoints and training loops use it."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.memory.small import Stack, equal, loss_of, stack, stream_stack, train, weights
from tests.memory.support import failing_block

from hybridtrainer.errors import ForeignCheckpointError, ModelError, TornStepError
from hybridtrainer.memory.home import StreamedHome
from hybridtrainer.memory.updates import LAST_NORM


def plain(blocks: int = 4) -> tuple[Stack, torch.optim.AdamW]:
    model = stack(blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def test_a_closure_is_refused():
    _, optimizer, _ = stream_stack()
    with pytest.raises(TypeError, match="no closure"):
        optimizer.step(lambda: 1.0)


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_scheduler_attaches_and_is_obeyed(clipping):
    expected, adamw = plain()
    found, optimizer, _ = stream_stack(clipping=clipping)
    for model, each in ((expected, adamw), (found, optimizer)):
        scheduler = torch.optim.lr_scheduler.StepLR(each, step_size=2, gamma=0.1)
        for step in range(5):
            train(model, each, 1, first=step)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert equal(weights(found), weights(expected))


def test_groups_are_kept_as_they_were_given():
    model = stack()
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    groups = [{"params": matrices, "lr": 0.5, "name": "matrices"}, {"params": vectors, "weight_decay": 0.0}]
    _, optimizer, _ = stream_stack(model, param_groups=groups, eps=1e-5)
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(matrices), len(vectors)]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert [group["eps"] for group in optimizer.param_groups] == [1e-5, 1e-5]
    assert optimizer.param_groups[0]["name"] == "matrices"
    assert {id(each) for each in optimizer.state} == {id(each) for each in model.parameters()}


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_state_dict_is_settled(clipping):
    model, optimizer, engine = stream_stack(clipping=clipping)
    expected, adamw = plain()
    train(model, optimizer, 3)
    train(expected, adamw, 3)
    found = optimizer.state_dict()["state"]
    assert all(unit.due is None for unit in engine.blocks)
    for index, other in adamw.state_dict()["state"].items():
        one = found[index]
        assert torch.equal(one["m"].view(-1), other["exp_avg"].view(-1))
        assert torch.equal(one["v"].view(-1), other["exp_avg_sq"].view(-1))
        assert int(one["step"]) == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_the_weights_that_a_model_shows_are_settled_too(clipping):
    model, optimizer, _ = stream_stack(clipping=clipping)
    expected, adamw = plain()
    train(model, optimizer, 1)
    train(expected, adamw, 1)
    assert equal(weights(model), weights(expected))


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_weights_that_are_loaded_are_not_changed_by_an_update_that_was_due(clipping):
    model, optimizer, _ = stream_stack(clipping=clipping)
    train(model, optimizer, 1)
    other = stack().state_dict()
    model.load_state_dict(other)
    loss_of(model)
    assert equal(weights(model), other)


@pytest.mark.parametrize("mode", ["fp32", "split8"])
@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_state_that_is_loaded_is_the_one_that_is_used(mode, clipping):
    model, optimizer, _ = stream_stack(mode=mode, clipping=clipping, clip_norm=0.1)
    train(model, optimizer, 3)
    of_model, of_optimizer = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, 4, first=3)
    again, other, _ = stream_stack(mode=mode, clipping=clipping, clip_norm=0.1)
    train(again, other, 2, first=7)
    again.load_state_dict(of_model)
    live = next(iter(other.state.values()))["m"]
    other.load_state_dict(of_optimizer)
    assert next(iter(other.state.values()))["m"] is live
    assert other.param_groups[0][LAST_NORM] == of_optimizer["param_groups"][0][LAST_NORM]
    assert train(again, other, 4, first=3) == expected


def test_a_state_that_is_loaded_ends_a_step_that_failed_half_way():
    model, optimizer, _ = stream_stack()
    good = copy.deepcopy(optimizer.state_dict())
    loss_of(model).backward()
    for part in (optimizer, model):
        with pytest.raises(TornStepError):
            part.state_dict()
    optimizer.load_state_dict(good)
    assert not any(state["m"].any() for state in optimizer.state_dict()["state"].values())
    train(model, optimizer, 1)


def test_a_foreign_state_is_refused_and_changes_nothing():
    model, optimizer, _ = stream_stack()
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    for foreign in (stream_stack(mode="split8")[1], stream_stack(stack(3))[1], plain()[1]):
        with pytest.raises(ForeignCheckpointError, match="another"):
            optimizer.load_state_dict(foreign.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for one, other in zip(after["state"].values(), before["state"].values(), strict=True):
        assert equal(one, other)


@pytest.mark.parametrize("slots", [1, 3])
def test_after_settling_weights_may_be_written_where_no_version_counter_sees_it(slots):
    expected, _ = plain()
    found, optimizer, _ = stream_stack(slots=slots)
    loss_of(found)  # some blocks are on the device
    optimizer.settle()
    for model in (expected, found):
        for parameter in model.blocks.parameters():
            parameter.data.add_(0.5)
    assert loss_of(found).item() == loss_of(expected).item()


def test_a_step_that_failed_half_way_is_not_ended_by_calling_step(monkeypatch):
    model, optimizer, engine = stream_stack()
    with failing_block(monkeypatch, 2), pytest.raises(RuntimeError, match="cosmic"):
        loss_of(model).backward()
    with pytest.raises(TornStepError, match="between two"):
        optimizer.step()
    assert engine.torn and engine.touched


def test_fused_updates_leave_no_gradient_behind():
    model, optimizer, _ = stream_stack()
    loss_of(model).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()


def test_zero_grad_frees_what_exact_clipping_has_kept():
    model, optimizer, engine = stream_stack(clipping="exact")
    before = weights(model)
    loss_of(model).backward()
    assert model.head.weight.grad is not None and engine.blocks[0].is_parked
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(unit.is_parked for unit in engine.blocks)
    optimizer.step()
    assert equal(weights(model), before)


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_steps_are_counted_only_for_what_was_updated(clipping):
    model, optimizer, engine = stream_stack(clipping=clipping)
    train(model, optimizer, 2)
    model.blocks[1].register_full_backward_hook(lambda _, into, __: (into[0] * float("nan"),))
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.settle()
    late = 3 if clipping == "fused" else 2  # the blocks behind the bad one had been updated already
    assert [int(unit.steps) for unit in engine.blocks] == [2, late, late, late]
    assert {name: int(unit.steps) for name, unit in zip(("into", "head"), optimizer.lone, strict=True)} == {
        "into": 2, "head": late,
    }  # fmt: skip


def test_a_part_that_a_step_does_not_use_is_not_updated():
    model, optimizer, engine = stream_stack()
    before = weights(model)
    model.blocks[3](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert [int(unit.steps) for unit in (*engine.blocks, *optimizer.lone)] == [0, 0, 0, 1, 0, 0]
    after = weights(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"blocks.3.linear.weight", "blocks.3.linear.bias"}


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_loss_that_is_not_finite_is_not_learned_even_where_its_gradients_are(clipping):
    model, optimizer, _ = stream_stack(clipping=clipping)
    before = weights(model)
    loss = loss_of(model) + float("inf")
    optimizer.updates.watch_loss(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert equal(weights(model), before)
    train(model, optimizer, 1)
    assert not equal(weights(model), before)


def test_skip_ends_a_step_without_an_update():
    model, optimizer, engine = stream_stack(clipping="exact")
    before = weights(model)
    loss_of(model).backward()
    optimizer.skip()
    optimizer.zero_grad()
    assert equal(weights(model), before)
    assert [int(unit.steps) for unit in engine.blocks] == [0] * 4
    assert optimizer.gradient_norm() == 0


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_the_gradient_norm_is_that_of_the_whole_model(clipping):
    model, optimizer, _ = stream_stack(clipping=clipping)
    expected, _ = plain()
    loss_of(model).backward()
    loss_of(expected).backward()
    gradients = [parameter.grad for parameter in expected.parameters() if parameter.grad is not None]
    assert torch.equal(optimizer.gradient_norm(), torch.nn.utils.get_total_norm(gradients))


def test_every_trained_parameter_has_a_home():
    model = stack()
    model.head.requires_grad_(False)
    model, _, _ = stream_stack(model)
    homes = {name: getattr(parameter, "home", None) for name, parameter in model.named_parameters()}
    assert {name for name, home in homes.items() if not isinstance(home, StreamedHome)} == {"head.weight"}


@pytest.mark.parametrize("clipping", ["fused", "exact"])
def test_a_second_backward_pass_through_one_graph_is_refused(clipping):
    model, _, _ = stream_stack(clipping=clipping)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    with pytest.raises(ModelError, match="second backward pass"):
        loss.backward()


def test_closing_finishes_the_copies():
    model, optimizer, engine = stream_stack()
    loss_of(model).backward()
    optimizer.step()
    optimizer.close()
    assert all(slot.home is None or slot.home.done() for slot in engine._weights.slots)


def test_a_group_that_comes_later_is_refused():
    _, optimizer, _ = stream_stack()
    with pytest.raises(ModelError, match=r"stream\(param_groups"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("clipping", ["fused", "exact"])
@pytest.mark.parametrize("unscale", [False, True])
def test_scaled_gradients_are_refused_and_no_step_is_made_with_them(clipping, unscale):
    model, optimizer, _ = stream_stack(clipping=clipping)
    train(model, optimizer, 1)
    good = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(ModelError, match="scaled the gradients"):
        scaler.step(optimizer)
    if clipping == "fused":
        with pytest.raises(TornStepError):  # some are updated
            model.state_dict()
        model.load_state_dict(good[0])
        optimizer.load_state_dict(good[1])
    assert equal(weights(model), good[0])
    expected, other, _ = stream_stack(clipping=clipping)
    train(expected, other, 1)
    assert train(model, optimizer, 3) == train(expected, other, 3)  # and goes on without a scaler


def test_a_scaler_that_is_off_changes_nothing():
    model, optimizer, _ = stream_stack()
    expected, other, _ = stream_stack()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    train(expected, other, 1, first=1)
    assert equal(weights(model), weights(expected))


@pytest.mark.parametrize(("mode", "is_taken"), [("fp32", True), ("split8", False)])
def test_torch_saves_the_state_as_it_is_in_fp32_and_cloned_in_other_modes(mode, is_taken):
    model, optimizer, _ = stream_stack(mode=mode)
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    if not is_taken:
        with pytest.raises(RuntimeError, match="different types"):
            torch.save(state, io.BytesIO())
        states = state["state"].items()
        state["state"] = {n: {name: each.clone() for name, each in values.items()} for n, values in states}
    saved = io.BytesIO()
    torch.save((model.state_dict(), state), saved)
    expected = train(model, optimizer, 2)
    again, other, _ = stream_stack(mode=mode)
    of_model, of_optimizer = torch.load(io.BytesIO(saved.getvalue()))
    again.load_state_dict(of_model)
    other.load_state_dict(of_optimizer)
    assert train(again, other, 2) == expected
