"""Ranges, ticks and places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtrainer.report.axes import Scale, padded, span, tick_labels, ticks


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_inside(low, width):
    high = low + width
    if (high - low) < 1e-5 * max(abs(low), abs(high)):
        return  # `span` never makes so narrow a range
    found = ticks(low, high)
    slack = width * 1e-6
    assert 1 <= len(found) <= 6
    assert all(low - slack <= tick <= high + slack for tick in found)
    assert len(set(tick_labels(found))) == len(found)


def test_labels_have_the_same_number_of_decimals():
    assert tick_labels([0.0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"]
    assert tick_labels([0.0, 20000.0]) == ["0", "20,000"]


@pytest.mark.parametrize("values", [[], [3.0], [0.0], [5.0, 5.0], [1e9, 1e9 + 1]])
def test_a_range_always_has_a_width(values):
    for from_zero in (False, True):
        low, high = span(values, from_zero=from_zero)
        assert high > low
        if from_zero:
            assert low <= 0 <= high


def test_lone_values_far_outside_are_left_out_of_the_range():
    low, high = padded([1.0 + x / 100 for x in range(100)] + [1e6])
    assert high < 5 and low < 1.0
    assert padded([1.0, 2.0, 1e6])[1] > 1e6


def test_a_scale_places_values():
    scale = Scale(0.0, 10.0, 100.0, 0.0)
    assert scale(2.5) == 75.0 and scale.offset == 100.0 and scale.holds(10.0) and not scale.holds(10.1)
