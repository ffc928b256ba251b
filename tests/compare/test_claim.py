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


def test_missed_seeds_are_told_for_those_arms_that_missed_some():
    assert missed_words({"hybrid": 2, "plain": 0}, 5) == " The target was missed by hybrid in 2 of 5 seeds."
    assert missed_words({"hybrid": 0, "plain": 0}, 5) == ""
