"""Horizons that pay are found, and where none pays no jump is tried for long."""

from __future__ import annotations

import random

import pytest

from hybridtrainer.phases.bandit import NOTHING_KNOWN, SHARES, Arms, choose, context, learn


def play(pays, rounds: int = 400, seed: int = 0) -> tuple[list[int | None], float]:
    """What is chosen in a run whose arms pay this on average, and what is gained in all."""
    arms, chosen, gained, drawn = NOTHING_KNOWN, [], 0.0, random.Random(seed)
    kept = failed = 0
    for number in range(rounds):
        x = context(20 * number, kept, failed)
        choice = choose(arms, x, 20 * number)
        chosen.append(choice)
        if choice is not None:
            payment = pays[choice] + drawn.gauss(0, 1)
            arms = learn(arms, choice, x, payment)
            gained += payment
            kept, failed = kept + (payment > 0), failed + (payment <= 0)
    return chosen, gained


def test_before_anything_is_known_a_jump_is_tried():
    assert choose(NOTHING_KNOWN, context(0, 0, 0), 0) == len(SHARES) - 1


@pytest.mark.parametrize("best", range(len(SHARES)))
def test_the_horizon_that_pays_is_found(best):
    pays = [-1.0] * len(SHARES)
    pays[best] = 2.0
    chosen, gained = play(pays)
    assert sum(choice == best for choice in chosen[100:]) > 0.9 * len(chosen[100:])
    assert gained > 0.8 * 2.0 * len(chosen)


@pytest.mark.parametrize("seed", range(5))
def test_where_no_horizon_pays_hardly_any_jump_is_tried(seed):
    chosen, gained = play([-1.0] * len(SHARES), seed=seed)
    assert sum(choice is not None for choice in chosen) < 0.1 * len(chosen)
    assert gained > -0.02 * 20 * len(chosen)  # costs, of twenty steps in each round


def test_a_correction_changes_the_payment_and_not_what_is_known_of_its_certainty():
    x = context(100, 1, 1)
    once = learn(NOTHING_KNOWN, 1, x, 3.0)
    corrected = learn(once, 1, x, -5.0, again=True)
    assert corrected[1].inverse == once[1].inverse
    assert corrected[1].paid == pytest.approx(learn(NOTHING_KNOWN, 1, x, -2.0)[1].paid)
    assert once[0] == NOTHING_KNOWN[0]


def test_the_inverse_is_one():
    arms: Arms = NOTHING_KNOWN
    seen = [context(10 * k, k % 3, k % 2) for k in range(6)]
    for x in seen:
        arms = learn(arms, 0, x, 1.0)
    total = [[float(i == j) + sum(x[i] * x[j] for x in seen) for j in range(3)] for i in range(3)]
    for i in range(3):
        row = [sum(total[i][k] * arms[0].inverse[k][j] for k in range(3)) for j in range(3)]
        assert row == pytest.approx([float(i == j) for j in range(3)], abs=1e-9)


def test_one_payment_beyond_all_bounds_does_not_decide_for_ever():
    x = context(0, 0, 0)
    arms = learn(NOTHING_KNOWN, 0, x, -1e12)
    for _ in range(12):
        arms = learn(arms, 0, x, 3.0)
    assert choose(arms, x, 0) is not None
