"""What may be claimed: the questions in their order, and the sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridtrainer.compare.claim import Facts, Paired, missed_words
from hybridtrainer.compare.interval import Interval


def estimate(mean: float, low: float, high: float) -> Paired:
    return Paired(Interval(mean, low, high), (mean,) * 5)


FASTER = Facts(
    "hybrid",
    "plain",
    "accuracy",
    0.99,
    seeds=5,
    arm_reached=True,
    baseline_reached=True,
    final=estimate(0.001, -0.001, 0.003),
    speedup=estimate(1.5, 1.3, 1.7),
    broken=0,
    baseline_broken=0,
    scale=1.0,
)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "faster"),
        ({"speedup": estimate(0.8, 0.7, 0.9)}, "slower"),
        ({"speedup": estimate(1.5, 0.9, 2.1)}, "not distinguishable"),
        ({"final": estimate(-0.1, -0.2, -0.05)}, "quality lost"),
        ({"broken": 1}, "quality lost"),
        ({"seeds": 2}, "no verdict"),
        ({"baseline_broken": 1}, "no verdict"),
        ({"baseline_reached": False}, "no verdict"),
    ],
)
def test_a_speedup_counts_only_where_no_question_before_it_forbids_it(change, verdict):
    assert replace(FASTER, **change).verdict(0.002)[0] == verdict


BOUND = replace(FASTER, baseline_reached=False, speedup=None, at_least=estimate(2.2899, 2.1188, 2.5))


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "faster"),
        ({"at_least": estimate(2.29, 1.0, 2.5)}, "no verdict"),
        ({"at_least": estimate(0.8, 0.7, 0.9)}, "no verdict"),
        ({"final": estimate(-0.1, -0.2, -0.05)}, "quality lost"),
        ({"final": estimate(-0.1, -0.2, 0.05)}, "not distinguishable"),
        ({"broken": 1}, "quality lost"),
        ({"seeds": 2}, "no verdict"),
        ({"baseline_broken": 1}, "no verdict"),
        ({"at_least": None}, "no verdict"),
    ],
)
def test_a_bound_counts_only_where_no_question_before_it_forbids_it(change, verdict):
    assert replace(BOUND, **change).verdict(0.002)[0] == verdict


def test_a_bound_is_said_to_be_one_and_rounded_down():
    assert BOUND.verdict(0.002)[1] == (
        "hybrid is at least 2.28 times as fast as plain to accuracy 0.99 (95% interval of that bound 2.11 to 2.50, "
        "5 seeds): plain does not get there and stay there in its whole run."
    )
    weak = replace(BOUND, at_least=estimate(1.2, 0.0, 1.5)).verdict(0.002)[1]
    assert weak.startswith(
        "No verdict: plain itself does not reach accuracy 0.99 and stay there; hybrid does, and is at"
    )
    assert "(95% interval of that bound never to 1.50, 5 seeds), which does not show that it is faster." in weak
    assert "(at least 2.28 times as fast in these)" in replace(BOUND, seeds=2).verdict(0.002)[1]
    chance = replace(BOUND, final=estimate(-0.1, -0.2, 0.05)).verdict(0.002)[1]
    assert "it gets to accuracy 0.99 at least 2.28 times as fast; its final accuracy is worse" in chance


def test_missed_seeds_are_told_for_those_arms_that_missed_some():
    assert missed_words({"hybrid": 2, "plain": 0}, 5) == " The target was missed by hybrid in 2 of 5 seeds."
    assert missed_words({"hybrid": 0, "plain": 0}, 5) == ""
