"""Comparing losses pair by pair."""

from __future__ import annotations

import math
from statistics import NormalDist, fmean, stdev

import numpy
import pytest

from hybridtrainer.predict.probe import compare


def test_means_and_gain_are_those_of_all_values():
    found = compare([[2.0, 4.0], [6.0]], [[1.0, 5.0], [3.0]])
    assert (found.before, found.after, found.gain) == (4.0, 3.0, 1.0)


def test_the_chance_is_that_of_a_normal_mean_of_the_differences():
    before = [[2.0, 2.5, 3.0], [2.2, 2.7]]
    after = [[1.9, 2.6, 2.8], [2.1, 2.5]]
    differences = [-0.1, 0.1, -0.2, -0.1, -0.2]
    error = stdev(differences) / math.sqrt(5)
    assert compare(before, after).chance_better == pytest.approx(NormalDist().cdf(-fmean(differences) / error))


def test_pairs_see_what_means_cannot():
    # Samples differ by far more than the jump does: only sample by sample is the gain visible.
    levels = numpy.random.default_rng(0).normal(2, 1, 64)
    gains = numpy.random.default_rng(1).normal(0.01, 0.005, 64)
    assert compare([levels.tolist()], [(levels - gains).tolist()]).chance_better > 0.999


def test_better_and_worse_are_opposites():
    a, b = [[1.0, 2.0, 3.5]], [[1.1, 1.8, 3.1]]
    assert compare(a, b).chance_better + compare(b, a).chance_better == pytest.approx(1)


def test_a_difference_that_is_noise_is_a_matter_of_chance():
    rng = numpy.random.default_rng(0)
    chances = [
        compare([rng.normal(2, 1, 16).tolist()], [rng.normal(2, 1, 16).tolist()]).chance_better for _ in range(400)
    ]
    assert fmean(chances) == pytest.approx(0.5, abs=0.05)
    assert sum(chance > 0.85 for chance in chances) / 400 == pytest.approx(0.15, abs=0.05)


@pytest.mark.parametrize(("after", "chance"), [(1.9, 1.0), (2.1, 0.0), (2.0, 0.0)])
def test_a_single_pair_and_equal_differences_are_decided_by_their_sign(after, chance):
    assert compare([[2.0]], [[after]]).chance_better == chance
    assert compare([[2.0], [2.0]], [[after], [after]]).chance_better == chance


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([[1.0], [2.0]], [[1.0], [math.nan]]),
        ([[1.0], [math.nan]], [[0.5], [1.0]]),
        ([[1.0], [2.0]], [[0.5], [math.inf]]),
        ([[1.0], [2.0]], [[0.5], [-math.inf]]),
        ([[math.inf], [math.inf]], [[1.0], [1.0]]),
        ([[math.inf], [1.0]], [[math.inf], [0.5]]),
        ([[1.0], [math.inf]], [[math.inf], [1.0]]),
        ([[math.inf], [-math.inf]], [[1.0], [1.0]]),
    ],
)
def test_what_is_not_finite_is_never_better(before, after):
    assert compare(before, after).chance_better == 0


def test_losses_near_the_largest_number_do_not_break_the_comparison():
    found = compare([[1.0], [2.0]], [[1.7e308], [1.7e308]])
    assert found.chance_better < 0.5


def test_measurements_of_different_batches_are_refused():
    with pytest.raises(ValueError):
        compare([[1.0, 2.0]], [[1.0]])
