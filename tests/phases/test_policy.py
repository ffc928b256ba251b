"""Each transition of the phase machine, with the reason it gives."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.phases import policy
from hybridtrainer.phases.policy import PolicyState
from hybridtrainer.records import Phase

RULES = HybridTrainerConfig(
    warmup_steps=3, full_steps=4, max_predict_steps=40, correction_interval=16, recovery_steps=5, max_failures=3
)
FULL = PolicyState(phase=Phase.FULL, longest_jump=16, steps_in_phase=2, real_steps=10)
COST = 1.5


def test_a_run_starts_with_warmup_and_the_longest_jump_allowed():
    state = policy.start(RULES)
    assert state == PolicyState(phase=Phase.WARMUP, longest_jump=16)
    assert policy.start(HybridTrainerConfig(max_predict_steps=9)).longest_jump == 9


def test_a_falling_rate_switches_auto_off_and_a_steady_one_does_not():
    steady = policy.unless_rate_falls(FULL, RULES, policy.LEAST_SHARE_LEFT)
    assert steady == replace(FULL, rate_checked=True)
    assert "will fall to 5% of its peak" in policy.unless_rate_falls(FULL, RULES, 0.05).off
    named = HybridTrainerConfig(predict=["jumps"])
    assert policy.unless_rate_falls(FULL, named, 0.05).off == ""


def test_a_model_that_begins_short_is_in_warmup_until_it_has_grown_and_then_anew():
    state = policy.in_warmup(policy.start(HybridTrainerConfig(warmup_steps=0)))
    for _ in range(20):
        state, reason = policy.after_real_step(state, RULES, None, is_short=True)
        assert (state.phase, reason) == (Phase.WARMUP, "")
    state = policy.after_growth(state, RULES)
    assert (state.phase, state.steps_in_phase) == (Phase.WARMUP, 0)
    for _ in range(RULES.warmup_steps):
        state, _ = policy.after_real_step(state, RULES, None)
    assert state.phase is Phase.FULL
    assert policy.after_growth(state, HybridTrainerConfig(warmup_steps=0)).phase is Phase.FULL


def test_without_warmup_a_run_starts_in_full():
    assert policy.start(HybridTrainerConfig(warmup_steps=0)).phase is Phase.FULL


def test_prediction_off_is_off_from_the_start_and_says_why():
    assert policy.start(HybridTrainerConfig(predict="off")).off == "predict is off in the configuration"
    assert policy.start(HybridTrainerConfig(predict=["samples"])).off == "the configuration does not name jumps"
    assert policy.start(HybridTrainerConfig(predict=[])).off
    assert policy.start(HybridTrainerConfig(predict=["jumps"])).off == ""


def test_warmup_lasts_its_steps_and_then_full_begins():
    state = policy.start(RULES)
    for step in range(1, 3):
        state, reason = policy.after_real_step(state, RULES, None)
        assert (state.phase, state.steps_in_phase, reason) == (Phase.WARMUP, step, "")
    state, reason = policy.after_real_step(state, RULES, None)
    assert (state.phase, state.steps_in_phase, state.real_steps) == (Phase.FULL, 0, 3)
    assert reason == "3 warmup steps are done"


def test_a_quiet_full_step_is_only_counted():
    state, reason = policy.after_real_step(FULL, RULES, None)
    assert state == replace(FULL, steps_in_phase=3, real_steps=11)
    assert reason == ""


def test_an_alarm_forces_full_steps_and_halves_the_jump():
    state, reason = policy.after_real_step(FULL, RULES, "loss 9 is 7.0 sigma above 2")
    assert (state.phase, state.steps_in_phase, state.forced_steps, state.longest_jump) == (Phase.FULL, 0, 5, 8)
    assert reason == "loss 9 is 7.0 sigma above 2: no jump for 5 steps"
    assert (state.failures, state.jumps_failed, state.balance) == (0, 0, 0)  # nobody's jump has failed


def test_an_alarm_on_the_last_warmup_step_is_not_lost():
    last = PolicyState(phase=Phase.WARMUP, longest_jump=16, steps_in_phase=2)
    state, _ = policy.after_real_step(last, RULES, "loss swings")
    assert state.forced_steps == RULES.recovery_steps


def test_an_alarm_changes_nothing_where_prediction_is_off():
    off = replace(FULL, off="because")
    state, reason = policy.after_real_step(off, RULES, "loss swings")
    assert state == replace(off, steps_in_phase=3, real_steps=11)
    assert reason == ""


def test_forced_steps_count_down_to_zero():
    state = replace(FULL, forced_steps=2)
    seen = []
    for _ in range(4):
        state, _ = policy.after_real_step(state, RULES, None)
        seen.append(state.forced_steps)
    assert seen == [1, 0, 0, 0]


@pytest.mark.parametrize(("sure", "phase"), [(0.849, Phase.FULL), (0.85, Phase.PREDICT), (1.0, Phase.PREDICT)])
def test_predict_is_entered_from_the_threshold_on_and_says_by_how_much(sure, phase):
    before = replace(FULL, steps_in_phase=4)
    state, reason = policy.consider(before, RULES, sure)
    assert (state.phase, state.steps_in_phase) == (phase, 0)
    verb = "reaches" if phase is Phase.PREDICT else "is below"
    assert reason == f"confidence {sure:.2f} {verb} 0.85"


def test_where_jumps_are_trusted_predict_is_entered_however_sure_the_forecast_is():
    for proofs, phase in ((policy.PROOFS - 1, Phase.FULL), (policy.PROOFS, Phase.PREDICT), (9, Phase.PREDICT)):
        state, reason = policy.consider(replace(FULL, proofs=proofs), RULES, 0.0)
        assert state.phase is phase
    assert reason == "jumps are trusted after 9 in a row"


def test_full_phases_grow_while_nothing_comes_of_looking_ahead_and_a_jump_that_paid_ends_that():
    state, lengths = FULL, []
    for _ in range(16):
        lengths.append(policy.full_length(state, RULES))
        assert not policy.full_is_over(replace(state, steps_in_phase=lengths[-1] - 1), RULES)
        assert policy.full_is_over(replace(state, steps_in_phase=lengths[-1]), RULES)
        state, _ = policy.consider(state, RULES, sure=0.0)
    assert lengths == [4] * 4 + [8] * 4 + [16] * 4 + [32] * 4
    assert policy.full_length(replace(state, looks_in_vain=10_000), RULES) == 32
    for worth, length in ((3, 4), (2, 4), (1, 32)):
        accepted = policy.after_accepted(state, horizon=12, worth=worth, cost=1.8)
        assert policy.full_length(policy.after_kept(accepted, RULES), RULES) == length
    assert policy.full_length(replace(state, looks_in_vain=10_000, proofs=policy.PROOFS), RULES) == 4


def test_an_accepted_jump_leads_to_correct_and_is_credited_with_its_worth_less_its_cost():
    predicting = replace(FULL, phase=Phase.PREDICT, balance=1.0)
    state = policy.after_accepted(predicting, horizon=12, worth=5, cost=1.5)
    assert (state.phase, state.steps_in_phase, state.balance) == (Phase.CORRECT, 0, 4.5)
    assert state.real_steps == predicting.real_steps
    assert (state.jumps_kept, state.jumps_failed) == (0, 0)  # it is not verified yet


def test_correction_steps_are_real_steps():
    state = policy.after_correction_step(replace(FULL, phase=Phase.CORRECT))
    assert (state.phase, state.steps_in_phase, state.real_steps) == (Phase.CORRECT, 3, 11)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 8), (16, 32), (24, 40), (40, 40)])
def test_a_kept_jump_doubles_the_next_up_to_what_is_allowed_and_clears_failures(before, after):
    state = policy.after_kept(replace(FULL, longest_jump=before, failures=2, jumps_kept=3), RULES)
    assert (state.longest_jump, state.failures, state.jumps_kept) == (after, 0, 4)


def test_two_jumps_in_a_row_are_trusted_until_failure_halves_what_they_have_proven():
    state = FULL
    for kept in range(1, 6):
        state = policy.after_kept(policy.after_accepted(state, 12, 6, COST), RULES)
        assert (state.proofs, state.is_trusted) == (kept, kept >= policy.PROOFS)
    assert policy.after_refused(state, RULES, COST)[0].proofs == 0
    for proofs in (2, 1, 0):
        state, _ = policy.after_rolled_back(state, RULES, 6)
        assert (state.proofs, state.is_trusted) == (proofs, proofs >= policy.PROOFS)
    assert policy.after_growth(replace(FULL, proofs=9), RULES).proofs == 0


def test_trusted_jumps_are_probed_now_and_then_to_know_what_they_are_worth():
    state, probed = replace(FULL, proofs=policy.PROOFS, price=0.25), []
    for jump in range(2 * policy.PRICED_FOR + 2):
        probed.append(state.needs_probe)
        state = (
            policy.after_accepted(state, 12, 6, COST, 2.0) if probed[-1] else policy.after_accepted(state, 12, 3, COST)
        )
        assert state.price == (0.5 if jump >= policy.PRICED_FOR else 0.25)
    assert probed == ([False] * policy.PRICED_FOR + [True]) * 2
    assert all(policy.after_accepted(replace(FULL, proofs=proofs), 12, 3, COST, 2.0).price == 0.25 for proofs in (0, 1))


def test_the_lowest_loss_of_a_probe_is_kept_until_the_model_grows():
    state = FULL
    for loss, lowest in ((3.0, 3.0), (2.0, 2.0), (2.5, 2.0), (None, 2.0)):
        state = policy.after_accepted(state, 12, 3, COST, loss)
        assert state.probe_loss == lowest
    assert policy.after_growth(state, RULES).probe_loss == math.inf


@pytest.mark.parametrize(("before", "after"), [(16, 8), (5, 2), (2, 1), (1, 1)])
def test_a_failed_jump_halves_the_next_and_forces_full_steps(before, after):
    predicting = replace(FULL, phase=Phase.PREDICT, longest_jump=before, balance=2.0)
    state, reason = policy.after_refused(predicting, RULES, cost=1.5)
    assert (state.phase, state.longest_jump, state.forced_steps) == (Phase.FULL, after, 5)
    assert (state.failures, state.jumps_failed, state.balance) == (1, 1, 0.5)
    assert (state.off, reason) == ("", "")


def test_a_jump_rolled_back_costs_its_worth_and_the_steps_made_on_it():
    accepted = policy.after_accepted(replace(FULL, phase=Phase.PREDICT), horizon=12, worth=5, cost=1.5)
    for _ in range(3):
        accepted = policy.after_correction_step(accepted)
    state, reason = policy.after_rolled_back(accepted, RULES, worth=5)
    assert state.balance == -1.5 - 3  # the attempt and three steps for nothing
    assert (state.phase, state.failures, state.jumps_failed, state.longest_jump) == (Phase.FULL, 1, 1, 8)
    assert (state.forced_steps, state.real_steps, reason) == (5, 13, "")


def test_three_failures_in_a_row_switch_prediction_off_and_two_do_not():
    state = FULL
    for count in (1, 2):
        state, reason = policy.after_refused(state, RULES, 1.0)
        assert (state.failures, state.off, reason) == (count, "", "")
    state, reason = policy.after_rolled_back(state, RULES, 1)  # of whatever kind
    assert state.off == "3 jumps in a row failed"
    assert reason == "prediction is switched off: 3 jumps in a row failed"


def test_a_kept_jump_between_failures_starts_the_count_again():
    state = FULL
    for _ in range(5):
        state, _ = policy.after_refused(state, RULES, 1.0)
        state, _ = policy.after_refused(state, RULES, 1.0)
        state = policy.after_kept(state, RULES)
    assert (state.off, state.failures, state.jumps_failed, state.jumps_kept) == ("", 0, 10, 5)


def test_confidence_is_the_forecasters_own_until_jumps_were_judged():
    assert policy.confidence(FULL, 0.7) == pytest.approx(0.7)
    kept, failed = replace(FULL, jumps_kept=6), replace(FULL, jumps_failed=6)
    assert 0.7 < policy.confidence(kept, 0.7) < 1
    assert 0 < policy.confidence(failed, 0.7) < 0.7
    assert policy.confidence(replace(FULL, jumps_kept=10**6), 0.1) == pytest.approx(1, abs=1e-3)
    assert policy.confidence(replace(FULL, jumps_kept=3, jumps_failed=1), 0.5) == pytest.approx((4 * 0.5 + 3) / 8)


def test_a_state_survives_as_plain_values():
    state = PolicyState(Phase.CORRECT, 7, 1, 3, 4, "because", 5, -1.5, 6, 8, proofs=2, price=0.3, unpriced=4)
    assert PolicyState.from_tree(json.loads(json.dumps(state.to_tree()))) == state
    assert PolicyState.from_tree(state.to_tree()).phase is Phase.CORRECT
    assert PolicyState.from_tree(state.to_tree() | {"rate_stays": True}) == state  # of an older checkpoint


def test_a_jump_that_memory_does_not_suffice_for_is_no_fault_of_the_forecaster():
    for phase, after in ((Phase.WARMUP, Phase.WARMUP), (Phase.PREDICT, Phase.FULL), (Phase.FULL, Phase.FULL)):
        state, off = policy.after_no_memory(replace(FULL, phase=phase), RULES)
        assert state.phase is after and off == ""
        assert (state.failures, state.forced_steps) == (1, RULES.recovery_steps)
        assert (state.jumps_failed, state.longest_jump, state.balance) == (0, FULL.longest_jump, FULL.balance)
        assert state.steps_in_phase == (FULL.steps_in_phase if phase is Phase.WARMUP else 0)
    state, off = policy.after_no_memory(replace(FULL, failures=2), RULES)
    assert off == f"prediction is switched off: {state.off}" and "for want of GPU memory" in state.off


def test_no_jump_is_tried_where_the_loss_is_expected_to_rise():
    before = policy.to_full(policy.start(RULES))
    state, reason = policy.consider(before, RULES, 0.99, progress=0.1)
    assert state.phase is Phase.FULL
    assert "expected to rise" in reason and "0.10" in reason
    for progress in (policy.LEAST_PROGRESS, 0.9, None):
        assert policy.consider(before, RULES, 0.99, progress)[0].phase is Phase.PREDICT
