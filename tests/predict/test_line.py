"""The line through two averages: a parabola through three losses, and what it says where there is none."""

from __future__ import annotations

import math

import pytest

from hybridtrainer.predict.line import PLACES, lowest_place


@pytest.mark.parametrize("lowest", [-1.0, -0.7, -0.2, 0.0, 0.3, 0.5])
def test_the_bottom_of_a_valley_is_found(lowest):
    assert lowest_place([3 * (place - lowest) ** 2 + 2 for place in PLACES]) == pytest.approx(lowest)


@pytest.mark.parametrize(("lowest", "expected"), [(-4.0, -1.0), (2.0, 0.5)])
def test_no_place_is_foreseen_outside_of_those_measured(lowest, expected):
    assert lowest_place([(place - lowest) ** 2 for place in PLACES]) == expected


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, 2.0, 1.5], -1.0),
        ([2.0, 1.0, math.nan], 0.0),
        ([2.0, 1.0, math.inf], 0.0),
        ([math.nan, math.nan, 1.0], 0.5),
        ([1.0, 1.0, 1.0], -1.0),
    ],
)
def test_without_a_valley_it_is_the_lowest_that_was_measured(losses, expected):
    assert lowest_place(losses) == expected
