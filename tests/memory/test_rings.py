"""What stays in the places of an engine, and what is given up first."""

from __future__ import annotations

import pytest
import torch

from hybridtrainer.memory.lanes import ThreadLanes
from hybridtrainer.memory.places import Home
from hybridtrainer.memory.rings import Rings, state_slots
from hybridtrainer.memory.slots import Ring

CPU = torch.device("cpu")
WEIGHTS, STATES, BLOCKS = 10, 20, range(8)
PORTIONS = [(key, 0) for key in BLOCKS]
SMALL = (8, 0)


def make(weight_slots: int = 3, state_slots: int = 3) -> Rings:
    lanes = ThreadLanes()
    weights = torch.zeros(WEIGHTS, dtype=torch.uint8)
    states = torch.zeros(STATES, dtype=torch.uint8)
    return Rings(
        Ring(lanes, weight_slots, WEIGHTS, CPU, lambda _: Home([(0, weights)])),
        Ring(lanes, state_slots, STATES, CPU, lambda key: Home([(0, states[:1] if key == SMALL else states)])),
    )


@pytest.mark.parametrize(
    ("spare", "weight_slots", "kept_weights", "kept_states"),
    [
        (0, 3, 0, 0),
        (9, 3, 0, 0),
        (25, 3, 2, 0),
        (39, 3, 3, 0),
        (40, 2, 5, 0),  # half of the weights: two slots are enough for the others
        (50, 2, 6, 0),
        (69, 2, 6, 0),  # all but those that have slots
        (70, 2, 6, 1),
        (10_000, 2, 6, 5),
    ],
)
def test_spare_memory_goes_to_weights_then_states(spare, weight_slots, kept_weights, kept_states):
    rings = make()
    rings.keep(spare, BLOCKS, PORTIONS)
    assert (len(rings.weights.slots), len(rings.weights.pinned)) == (weight_slots, kept_weights)
    assert (len(rings.states.slots), len(rings.states.pinned)) == (3, kept_states)
    assert (weight_slots - 3 + kept_weights) * WEIGHTS + kept_states * STATES <= spare


@pytest.mark.parametrize(
    ("portions", "blocks", "slots"), [(0, 1, 1), (1, 1, 1), (1, 2, 2), (1, 8, 3), (7, 1, 7), (7, 3, 9)]
)
def test_all_states_of_a_block_have_slots_and_two_are_spare(portions, blocks, slots):
    assert state_slots(portions, blocks) == slots


def test_what_stays_is_spread_evenly():
    rings = make()
    rings.keep(30, BLOCKS, PORTIONS)
    assert sorted(rings.weights.pinned) == [0, 2, 5]


def test_small_states_stay_from_the_start():
    rings = make()
    rings.keep_small({(7, 0): STATES, SMALL: 1})
    assert list(rings.states.pinned) == [SMALL]


def test_what_is_small_is_not_given_up():
    rings = make()
    rings.keep_small({SMALL: 1})
    rings.keep(10, BLOCKS, PORTIONS)
    assert rings.release(in_use=())
    assert not rings.release(in_use=())
    assert (list(rings.weights.pinned), list(rings.states.pinned)) == ([], [SMALL])


def test_states_are_given_up_before_weights_and_nothing_in_use():
    rings = make()
    rings.keep(50 + 40, BLOCKS, PORTIONS)
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
    rings.keep_small({SMALL: 1})
    assert rings.spare_bytes() == 0
    rings.keep(50 + 40, BLOCKS, PORTIONS)
    assert rings.spare_bytes() == 6 * WEIGHTS + 2 * STATES
    while rings.release(in_use=()):
        pass
    assert rings.spare_bytes() == 0
