"""What stays in the places of an engine, and what is given up first."""

from __future__ import annotations

import pytest
import torch

from hybridtrainer.memory.lanes import ThreadLanes
from hybridtrainer.memory.rings import Rings
from hybridtrainer.memory.slots import Ring

CPU = torch.device("cpu")
WEIGHTS, STATES, BLOCKS = 10, 20, range(8)


def make(weight_slots: int = 3, state_slots: int = 2) -> Rings:
    lanes = ThreadLanes()
    host = {key: torch.zeros(STATES, dtype=torch.uint8) for key in BLOCKS} | {8: torch.zeros(1, dtype=torch.uint8)}
    return Rings(
        Ring(lanes, weight_slots, WEIGHTS, CPU, lambda key: host[key][:WEIGHTS]),
        Ring(lanes, state_slots, STATES, CPU, host.__getitem__),
    )


@pytest.mark.parametrize(
    ("spare", "weight_slots", "kept_weights", "state_slots", "kept_states"),
    [
        (0, 3, 0, 2, 0),
        (19, 3, 1, 2, 0),  # too little for a third slot of states
        (20, 3, 0, 3, 0),
        (45, 3, 2, 3, 0),
        (59, 3, 3, 3, 0),
        (60, 2, 5, 3, 0),  # half of the weights: two slots are enough for the others
        (70, 2, 6, 3, 0),
        (89, 2, 6, 3, 0),  # all but those that have slots
        (90, 2, 6, 3, 1),
        (10_000, 2, 6, 3, 5),
    ],
)
def test_spare_memory_goes_to_slots_then_weights_then_states(
    spare, weight_slots, kept_weights, state_slots, kept_states
):
    rings = make()
    rings.keep(spare, BLOCKS)
    assert (len(rings.weights.slots), len(rings.weights.pinned)) == (weight_slots, kept_weights)
    assert (len(rings.states.slots), len(rings.states.pinned)) == (state_slots, kept_states)
    used = (weight_slots - 3 + kept_weights) * WEIGHTS + (state_slots - 2 + kept_states) * STATES
    assert used <= spare


def test_what_stays_is_spread_evenly():
    rings = make()
    rings.keep(20 + 30, BLOCKS)
    assert sorted(rings.weights.pinned) == [0, 2, 5]


def test_small_states_stay_from_the_start():
    rings = make()
    rings.keep_small({7: STATES, 8: 1})
    assert list(rings.states.pinned) == [8]


def test_what_is_small_is_not_given_up():
    rings = make()
    rings.keep_small({8: 1})
    rings.keep(20 + 10, BLOCKS)
    assert rings.release(in_use=())
    assert not rings.release(in_use=())
    assert (list(rings.weights.pinned), list(rings.states.pinned)) == ([], [8])


def test_states_are_given_up_before_weights_and_nothing_in_use():
    rings = make()
    rings.keep(20 + 50 + 40, BLOCKS)
    assert (len(rings.weights.pinned), len(rings.states.pinned)) == (6, 2)
    while rings.states.pinned:
        assert rings.release(in_use=())
        assert len(rings.weights.pinned) == 6
    last = list(rings.weights.pinned)[-1]
    while rings.release(in_use=(last,)):
        pass
    assert list(rings.weights.pinned) == [last]


def test_only_the_rings_that_there_are_count():
    assert len(list(make())) == 2


def test_what_would_be_given_up_is_known_beforehand():
    rings = make()
    rings.keep_small({8: 1})
    assert rings.spare_bytes() == 0
    rings.keep(20 + 50 + 40, BLOCKS)
    assert rings.spare_bytes() == 6 * WEIGHTS + 2 * STATES
    while rings.release(in_use=()):
        pass
    assert rings.spare_bytes() == 0
