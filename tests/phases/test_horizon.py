"""How far a jump may reach, and what it is worth."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.phases import policy
from hybridtrainer.phases.horizon import Worth, jump_cost, jump_worth, next_horizon
from hybridtrainer.phases.policy import PolicyState
from hybridtrainer.records import Phase
from hybridtrainer.tree import pack, unpack

RULES = HybridTrainerConfig(full_steps=4, max_predict_steps=20, correction_interval=12, correct_steps=3)
READY = PolicyState(phase=Phase.FULL, longest_jump=12, steps_in_phase=4, real_steps=1000)
COST = 1.5


def test_a_jump_costs_two_forward_passes_a_batch_and_some_work():
    assert jump_cost(1) > 2 / 3
    assert jump_cost(5) - jump_cost(3) == pytest.approx(2 * 2 / 3)


def test_a_jump_costs_more_where_steps_are_quicker_than_copies():
    costs = [jump_cost(2, where) for where in ("cpu", "gpu", "streamed")]
    assert costs == sorted(costs)
    allowed = replace(READY, balance=0.0, real_steps=1000)
    assert next_horizon(allowed, RULES, jump_cost(2, "gpu"), None)[0] == 12
    horizon, reason = next_horizon(allowed, RULES, jump_cost(2, "streamed"), None)
    assert horizon == 0
    assert reason.startswith("a failed jump would bring what jumps have cost to 51.3 steps; 20.0 are allowed")


def test_a_ready_state_may_jump_as_far_as_its_longest_jump():
    assert next_horizon(READY, RULES, COST, None) == (12, "")
    assert next_horizon(replace(READY, longest_jump=5), RULES, COST, None) == (5, "")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (replace(READY, off="3 jumps in a row failed"), "3 jumps in a row failed"),
        (replace(READY, steps_in_phase=3), "the Full phase goes on"),
        (replace(READY, forced_steps=2), "Full is forced for 2 more steps"),
        (replace(READY, foreseen_steps=20, phase=Phase.CORRECT), "20 steps were foreseen since the last Full phase"),
        (
            replace(READY, balance=-20.0),
            "a failed jump would bring what jumps have cost to 21.5 steps; 20.0 are allowed so far",
        ),
        (
            replace(READY, real_steps=10),
            "a failed jump would bring what jumps have cost to 1.5 steps; 0.2 are allowed so far",
        ),
    ],
)
def test_no_jump_has_a_reason(state, words):
    assert next_horizon(state, RULES, COST, None) == (0, words)


def test_no_run_of_failures_loses_more_than_the_waste_limit():
    rules = RULES.model_copy(update={"waste_limit": 0.02, "max_failures": 1000, "recovery_steps": 1})
    state = replace(READY, real_steps=0)
    attempts = 0
    for _ in range(5000):
        state, _ = policy.after_real_step(state, rules, None)
        reach, _ = next_horizon(state, rules, COST, None)
        if reach:
            attempts += 1
            state, _ = policy.after_refused(state, rules, COST, failed=True)
        assert -state.balance <= rules.waste_limit * state.real_steps
    assert attempts == pytest.approx(0.02 * 5000 / COST, abs=2)  # and what is allowed is used


def test_what_jumps_have_gained_may_be_risked():
    gained = replace(READY, real_steps=1, balance=10.0)
    assert next_horizon(gained, RULES, COST, None)[0] == 12
    assert next_horizon(replace(gained, balance=1.0), RULES, COST, None)[0] == 0


def test_a_waste_limit_of_nothing_allows_no_first_jump():
    rules = RULES.model_copy(update={"waste_limit": 0.0})
    assert next_horizon(replace(READY, real_steps=10**9), rules, COST, None)[0] == 0


def test_jumps_in_a_row_share_the_horizon_between_two_full_phases():
    state = replace(READY, phase=Phase.CORRECT, steps_in_phase=3, foreseen_steps=12)
    assert next_horizon(state, RULES, COST, None) == (8, "")
    assert next_horizon(replace(state, foreseen_steps=19), RULES, COST, None) == (1, "")


def test_correct_does_not_wait_for_full_steps():
    assert next_horizon(replace(READY, phase=Phase.CORRECT, steps_in_phase=0), RULES, COST, None)[0] == 12


@pytest.mark.parametrize(("left", "reach"), [(100, 12), (15, 12), (14, 11), (4, 1), (3, 0), (0, 0)])
def test_a_jump_leaves_room_for_its_correction_before_the_end(left, reach):
    found, reason = next_horizon(READY, RULES, COST, left)
    assert found == reach
    assert reason == ("" if reach else "the run is about to end")


def worth(
    gain: float = 0.02,
    chance_better: float = 0.99,
    confidence: float = 1.0,
    pace: float = 0.002,
    threshold: float = 0.85,
    share: float = 1.0,
) -> Worth:
    rules = HybridTrainerConfig(confidence_threshold=threshold, lasting_share=share)
    found = jump_worth(
        gain=gain, chance_better=chance_better, confidence=confidence, pace=pace, horizon=15, rules=rules
    )
    assert found.reason
    assert not (found.failed and found.steps)
    return found


def test_a_certain_gain_is_worth_the_steps_it_would_have_taken():
    assert worth(gain=0.0201) == Worth(10, failed=False, reason="worth 10 of 15 steps")
    assert worth(gain=0.0201, pace=0.004).steps == 5


def test_only_the_share_that_lasts_is_credited():
    assert [worth(gain=0.0201, share=share).steps for share in (1.0, 0.5, 0.25, 0.01)] == [10, 5, 2, 0]
    assert HybridTrainerConfig().lasting_share == 0.25


def test_no_jump_is_worth_more_than_its_horizon():
    assert worth(gain=5.0).steps == 15
    assert worth(pace=0.0).steps == 15


def test_a_gain_worth_less_than_a_step_is_refused_and_no_failure():
    assert worth(gain=0.0001) == Worth(0, failed=False, reason="worth 0 of 15 steps")


def test_less_confidence_makes_a_gain_worth_less():
    values = [worth(gain=0.0301, confidence=confidence).steps for confidence in (1.0, 0.9, 0.8, 0.6, 0.3, 0.0)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 15 and values[-1] == 0
    assert len(set(values)) >= 4


def test_a_doubtful_gain_is_a_failure_and_is_refused_with_its_chance():
    assert worth(chance_better=0.84) == Worth(0, failed=True, reason="better with a chance of 0.84, below 0.85")
    assert worth(chance_better=0.85).steps > 0


@pytest.mark.parametrize("gain", [0.0, -0.02, -5.0, math.nan, -math.inf])
@pytest.mark.parametrize("pace", [0.0, 0.002])
def test_what_is_no_better_is_worth_nothing_even_where_everything_is_allowed(gain, pace):
    found = worth(gain=gain, chance_better=0.0, pace=pace, threshold=0.0)
    assert found.steps == 0
    assert found.failed


@pytest.mark.parametrize(("gain", "pace"), [(0.02, 5e-324), (1e300, 1e-300), (math.inf, 0.002)])
def test_a_gain_beyond_all_measure_is_worth_at_most_the_horizon(gain, pace):
    assert 0 <= worth(gain=gain, pace=pace).steps <= 15


LEARNING = RULES.model_copy(update={"horizon": "linucb", "waste_limit": 1.0, "max_failures": 10_000})


def test_with_linucb_the_horizon_is_a_share_of_the_longest_and_failure_does_not_halve_it():
    state = replace(policy.start(LEARNING), phase=Phase.FULL, steps_in_phase=4, real_steps=1000, longest_jump=1)
    reach, reason = next_horizon(state, LEARNING, COST, None)
    assert (reach, reason) == (12, "")  # the longest is hoped to pay most
    state, _ = policy.after_refused(state, LEARNING, COST, failed=True)
    reaches = set()
    for _ in range(60):
        state = replace(state, steps_in_phase=4, forced_steps=0)
        reaches.add(next_horizon(state, LEARNING, COST, None)[0])
        state, _ = policy.after_refused(state, LEARNING, COST, failed=True)
    assert {12, 6, 0} <= reaches <= {12, 6, 3, 0}


def test_with_linucb_jumps_that_never_pay_are_given_up_and_those_that_pay_grow_long():
    for worth_of, least, most in ((lambda reach: 0, 0.0, 0.1), (lambda reach: reach, 0.9, 1.0)):
        state, reaches = replace(policy.start(LEARNING), phase=Phase.FULL, real_steps=100), []
        for _ in range(100):
            for _ in range(LEARNING.full_steps + LEARNING.recovery_steps):
                state, _ = policy.after_real_step(state, LEARNING, None)
            reach, _ = next_horizon(state, LEARNING, COST, None)
            reaches.append(reach)
            if not reach:
                continue
            if worth := worth_of(reach):
                state = policy.to_full(policy.after_kept(policy.after_accepted(state, reach, worth, COST), LEARNING))
            else:
                state, _ = policy.after_refused(state, LEARNING, COST, failed=True)
        assert least <= sum(reach == 12 for reach in reaches[20:]) / 80 <= most
        if not least:
            assert sum(map(bool, reaches[20:])) <= 8


def test_a_roll_back_is_charged_to_the_horizon_that_was_jumped():
    state = replace(policy.start(LEARNING), phase=Phase.FULL, steps_in_phase=4, real_steps=1000)
    accepted = policy.after_accepted(state, 12, 3, COST)
    assert accepted.attempt is not None
    number, x, cost = accepted.attempt
    assert (number, cost) == (2, COST)
    undone, _ = policy.after_rolled_back(replace(accepted, steps_in_phase=2), LEARNING, 3)
    change = [after - before for after, before in zip(undone.arms[2].paid, state.arms[2].paid, strict=True)]
    assert change == pytest.approx([((3 - COST) - 5) / COST * each for each in x])


def test_what_a_bandit_has_learned_survives_a_checkpoint_to_the_bit():
    state = replace(policy.start(LEARNING), phase=Phase.FULL, steps_in_phase=4, real_steps=1000)
    state, _ = policy.after_refused(state, LEARNING, COST, failed=True)
    tensors, document = pack(state.to_tree())
    again = PolicyState.from_tree(unpack(json.loads(json.dumps(document)), tensors.__getitem__))
    assert again == state
    assert again.arm() == state.arm()
