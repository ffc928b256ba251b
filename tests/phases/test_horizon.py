"""How far a jump may reach, and what it is worth."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.phases import policy
from hybridtrainer.phases.horizon import (
    REACH,
    Worth,
    correction_steps,
    jump_cost,
    next_horizon,
    probed_worth,
    trusted_worth,
)
from hybridtrainer.phases.policy import PolicyState
from hybridtrainer.records import Phase
from hybridtrainer.tree import pack, unpack

RULES = HybridTrainerConfig(full_steps=4, max_predict_steps=20, correction_interval=12, correct_steps=3)
READY = PolicyState(phase=Phase.FULL, longest_jump=12, steps_in_phase=4, real_steps=1000)
COST = 1.5
SEEN = 1000  # real steps that the windows span, more than any of these jumps needs


def test_a_jump_costs_two_forward_passes_a_batch_and_some_work():
    assert jump_cost(1) > 2 / 3
    assert jump_cost(5) - jump_cost(3) == pytest.approx(2 * 2 / 3)


def test_a_jump_costs_more_where_steps_are_quicker_than_copies():
    costs = [jump_cost(2, where) for where in ("cpu", "gpu", "streamed")]
    assert costs == sorted(costs)
    allowed = replace(READY, balance=0.0, real_steps=1000)
    assert next_horizon(allowed, RULES, jump_cost(2, "gpu"), SEEN, None)[0] == 12
    horizon, reason = next_horizon(allowed, RULES, jump_cost(2, "streamed"), SEEN, None)
    assert horizon == 0
    assert reason.startswith("a failed jump would bring what jumps have cost to 51.3 steps; 20.0 are allowed")


def test_a_ready_state_may_jump_as_far_as_its_longest_jump():
    assert next_horizon(READY, RULES, COST, SEEN, None) == (12, "")
    assert next_horizon(replace(READY, longest_jump=5), RULES, COST, SEEN, None) == (5, "")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (replace(READY, off="3 jumps in a row failed"), "3 jumps in a row failed"),
        (replace(READY, steps_in_phase=3), "the Full phase goes on"),
        (replace(READY, forced_steps=2), "Full is forced for 2 more steps"),
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
    assert next_horizon(state, RULES, COST, SEEN, None) == (0, words)


def test_no_run_of_failures_loses_more_than_the_waste_limit():
    rules = RULES.model_copy(update={"waste_limit": 0.02, "max_failures": 1000, "recovery_steps": 1})
    state = replace(READY, real_steps=0)
    attempts = 0
    for _ in range(5000):
        state, _ = policy.after_real_step(state, rules, None)
        reach, _ = next_horizon(state, rules, COST, SEEN, None)
        if reach:
            attempts += 1
            state, _ = policy.after_refused(state, rules, COST)
        assert -state.balance <= rules.waste_limit * state.real_steps
    assert attempts == pytest.approx(0.02 * 5000 / COST, abs=2)  # and what is allowed is used


def test_what_jumps_have_gained_may_be_risked():
    gained = replace(READY, real_steps=1, balance=10.0)
    assert next_horizon(gained, RULES, COST, SEEN, None)[0] == 12
    assert next_horizon(replace(gained, balance=1.0), RULES, COST, SEEN, None)[0] == 0


def test_a_waste_limit_of_nothing_allows_no_first_jump():
    rules = RULES.model_copy(update={"waste_limit": 0.0})
    assert next_horizon(replace(READY, real_steps=10**9), rules, COST, SEEN, None)[0] == 0


@pytest.mark.parametrize(("seen", "reach"), [(1000, 12), (48, 12), (47, 11), (8, 2), (7, 1), (0, 1)])
def test_no_jump_looks_further_ahead_than_a_quarter_of_what_windows_look_back(seen, reach):
    assert next_horizon(READY, RULES, COST, seen, None) == (reach, "")
    assert reach <= max(1, REACH * seen)


def test_a_correct_phase_grows_with_what_was_foreseen():
    assert [correction_steps(horizon, RULES) for horizon in (1, 12, 13, 24, 25)] == [3, 3, 6, 6, 9]


@pytest.mark.parametrize(("left", "reach"), [(100, 12), (18, 12), (15, 12), (14, 11), (4, 1), (3, 0), (0, 0)])
def test_a_jump_leaves_room_for_its_correction_before_the_end(left, reach):
    found, reason = next_horizon(READY, RULES, COST, SEEN, left)
    assert found == reach
    assert reason == ("" if reach else "the run is about to end")


def worth(
    gain: float = 0.02,
    chance_better: float = 0.99,
    confidence: float = 1.0,
    pace: float = 0.002,
    threshold: float = 0.85,
    share: float = 1.0,
    proofs: int = 0,
    before: float = 2.0,
) -> Worth:
    rules = HybridTrainerConfig(confidence_threshold=threshold, lasting_share=share)
    probe = SimpleNamespace(before=before, gain=gain, chance_better=chance_better, error=0.1)
    found = probed_worth(probe, confidence, pace, 30, replace(READY, proofs=proofs, probe_loss=2.0), rules)
    assert found.reason
    return found


def test_a_certain_gain_is_worth_the_steps_it_would_have_taken():
    assert worth(gain=0.0201) == Worth(10, "worth 10 of 30 steps")
    assert worth(gain=0.0201, pace=0.004).steps == 5


def test_only_the_share_that_lasts_is_credited():
    assert [worth(gain=0.0201, share=share).steps for share in (1.0, 0.5, 0.25, 0.01)] == [10, 5, 2, 1]
    assert HybridTrainerConfig().lasting_share == 0.25


def test_no_jump_is_worth_more_than_half_of_its_horizon_and_none_more_than_a_step_where_nothing_falls():
    assert worth(gain=5.0).steps == 15
    assert worth(gain=5.0, pace=0.0).steps == 1


def test_a_jump_that_is_better_at_all_stands_for_a_step():
    assert worth(gain=0.0001) == Worth(1, "worth 1 of 30 steps")


def test_less_confidence_makes_a_gain_worth_less():
    values = [worth(gain=0.0301, confidence=confidence).steps for confidence in (1.0, 0.9, 0.8, 0.6, 0.3, 0.0)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 15 and values[-1] == 1
    assert len(set(values)) >= 4


def test_a_doubtful_gain_is_refused_with_its_chance():
    assert worth(chance_better=0.84) == Worth(0, "better with a chance of 0.84, below 0.85")
    assert worth(chance_better=0.85).steps > 0


@pytest.mark.parametrize("gain", [0.0, -0.02, -5.0, math.nan, -math.inf])
@pytest.mark.parametrize("pace", [0.0, 0.002])
def test_what_is_no_better_is_worth_nothing_even_where_everything_is_allowed(gain, pace):
    found = worth(gain=gain, chance_better=0.0, pace=pace, threshold=0.0)
    assert found == Worth(0, "no better")


TRUSTED = policy.PROOFS


@pytest.mark.parametrize("pace", [0.0, 0.002])
def test_where_jumps_are_trusted_a_probe_says_only_what_they_are_worth(pace):
    assert worth(gain=-0.02, chance_better=0.0, proofs=TRUSTED, pace=pace).steps == 1
    assert worth(gain=0.0201, chance_better=0.1, proofs=TRUSTED).steps == 10
    for gain in (math.nan, math.inf, -math.inf):
        assert worth(gain=gain, chance_better=0.0, proofs=TRUSTED, pace=pace).steps == 0


def test_no_jump_is_trusted_while_the_loss_of_the_probe_batches_rises():
    assert worth(before=2.19, proofs=TRUSTED).steps
    assert worth(before=2.21, proofs=TRUSTED) == Worth(0, "the probe loss has risen from 2.0000")
    assert worth(before=9.0).steps  # one that is not trusted is judged by what it does


def test_without_a_probe_a_jump_is_worth_the_share_that_the_newest_probe_has_shown():
    for price, steps in ((0.0, 1), (0.05, 1), (0.4, 6), (1.0, 15)):
        found = trusted_worth(replace(READY, price=price, proofs=7), 15)
        assert found == Worth(steps, f"trusted after 7 in a row, worth {steps} of 15 steps")


@pytest.mark.parametrize(("gain", "pace"), [(0.02, 5e-324), (1e300, 1e-300), (math.inf, 0.002)])
def test_a_gain_beyond_all_measure_is_worth_at_most_the_horizon(gain, pace):
    assert 0 <= worth(gain=gain, pace=pace).steps <= 15


LEARNING = RULES.model_copy(update={"horizon": "linucb", "waste_limit": 1.0, "max_failures": 10_000})


def test_with_linucb_the_horizon_is_a_share_of_the_longest_and_failure_does_not_halve_it():
    state = replace(policy.start(LEARNING), phase=Phase.FULL, steps_in_phase=4, real_steps=1000, longest_jump=1)
    reach, reason = next_horizon(state, LEARNING, COST, SEEN, None)
    assert (reach, reason) == (20, "")  # the longest is hoped to pay most
    state, _ = policy.after_refused(state, LEARNING, COST)
    reaches = set()
    for _ in range(60):
        state = replace(state, steps_in_phase=4, forced_steps=0)
        reaches.add(next_horizon(state, LEARNING, COST, SEEN, None)[0])
        state, _ = policy.after_refused(state, LEARNING, COST)
    assert {20, 10, 0} <= reaches <= {20, 10, 5, 0}


def test_with_linucb_jumps_that_never_pay_are_given_up_and_those_that_pay_grow_long():
    for worth_of, least, most in ((lambda reach: 0, 0.0, 0.1), (lambda reach: reach, 0.9, 1.0)):
        state, reaches = replace(policy.start(LEARNING), phase=Phase.FULL, real_steps=100), []
        for _ in range(100):
            for _ in range(LEARNING.full_steps + LEARNING.recovery_steps):
                state, _ = policy.after_real_step(state, LEARNING, None)
            reach, _ = next_horizon(state, LEARNING, COST, SEEN, None)
            reaches.append(reach)
            if not reach:
                continue
            if worth := worth_of(reach):
                state = policy.to_full(policy.after_kept(policy.after_accepted(state, reach, worth, COST), LEARNING))
            else:
                state, _ = policy.after_refused(state, LEARNING, COST)
        assert least <= sum(reach == 20 for reach in reaches[20:]) / 80 <= most
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
    state, _ = policy.after_refused(state, LEARNING, COST)
    tensors, document = pack(state.to_tree())
    again = PolicyState.from_tree(unpack(json.loads(json.dumps(document)), tensors.__getitem__))
    assert again == state
    assert again.arm() == state.arm()
