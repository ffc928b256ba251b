"""What travels, and the state that an optimizer shows of it."""

from __future__ import annotations

import torch
from torch import nn

from hybridtrainer.memory.arena import Arena, Piece, paged
from hybridtrainer.memory.layout import Kind, lay_out
from hybridtrainer.memory.units import Unit

LAYOUT = lay_out(
    [
        Kind("w", (3, 2), "fp32", True),
        Kind("frozen", (4,), "fp32", False, torch.float32),
        Kind("b", (5,), "split32", True),
    ]
)


def make_unit() -> Unit:
    arena = Arena(paged(LAYOUT.weight_bytes) + paged(LAYOUT.state_bytes), torch.device("cpu"))
    weights, states = arena.take(LAYOUT.weight_bytes), arena.take(LAYOUT.state_bytes)
    parameters = tuple(
        nn.Parameter(entry.weight_view(weights.shown), requires_grad=entry.trainable) for entry in LAYOUT.entries
    )
    nothing = arena.take(0)
    assert isinstance(nothing, Piece)
    return Unit(0, LAYOUT, parameters, weights, states, nothing)


def test_only_trained_parameters_have_a_state():
    unit = make_unit()
    assert [entry.name for entry, _ in unit.trainable] == ["w", "b"]
    state = unit.optimizer_state()
    assert list(state) == [unit.parameters[0], unit.parameters[2]]
    assert [sorted(values) for values in state.values()] == [["m", "step", "v"], ["low", "m", "step", "v"]]


def test_the_state_is_live_and_lies_in_host_memory():
    unit = make_unit()
    state = unit.optimizer_state()[unit.parameters[0]]
    before = unit.states.version()
    state["m"].fill_(3)
    assert unit.layout.entries[0].state_views(unit.states.lanes)["m"].tolist() == [3.0] * 6
    assert unit.states.version() > before  # others have written: what was fetched is out of date
    unit.steps += 1
    assert [int(values["step"]) for values in unit.optimizer_state().values()] == [1, 1]
    assert int(state["step"]) == 1


def test_a_new_unit_has_nothing_to_do_and_counts_for_itself():
    one, other = make_unit(), make_unit()
    one.steps += 1
    assert (int(one.steps), int(other.steps)) == (1, 0)
    assert not one.is_parked and one.due is None
