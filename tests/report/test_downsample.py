"""Long series made short without losing what stands out."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from hybridtrainer.report.downsample import forward_only, smooth, spread, thin, value_at


def test_a_lone_spike_among_a_hundred_thousand_points_is_kept():
    points = [(float(x), 1.0 + random.Random(x).random()) for x in range(100_000)]
    points[41_234], points[77_777] = (41_234.0, 99.0), (77_777.0, -5.0)
    kept = thin(points, 400)
    assert len(kept) <= 400
    assert points[41_234] in kept and points[77_777] in kept
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert kept == sorted(kept)


def test_a_gap_stays_a_gap():
    points = [(float(x), None if x == 500 else 1.0) for x in range(1000)]
    assert (500.0, None) in thin(points, 50)


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=300), st.integers(4, 60))
def test_thinning_keeps_lowest_and_highest_and_order(heights, limit):
    points = [(float(x), y) for x, y in enumerate(heights)]
    kept = thin(points, limit)
    assert kept == [point for point in points if point in kept]
    known = [y for y in heights if y is not None]
    if known:
        shown = [y for _, y in kept if y is not None]
        assert (min(shown), max(shown)) == (min(known), max(known))
    assert len(kept) <= limit * 1.5 + 2


def test_spreading_keeps_both_ends():
    assert spread(list(range(1000)), 5) == [0, 250, 500, 749, 999]
    assert spread([1, 2], 5) == [1, 2] and spread([1, 2, 3], 1) == [3]


def test_smoothing_is_a_mean_that_ignores_gaps():
    assert smooth([2.0] * 5) == [2.0] * 5
    values = smooth([0.0, None, 1.0], window=2)
    assert values[0] == 0.0 and values[1] is None and values[2] == 1 / 1.5


def test_a_roll_back_takes_back_what_was_made():
    assert forward_only([1, 2, 6, 7, 2, 3]) == [0, 4, 5]
    assert forward_only([]) == []


def test_a_value_between_points_lies_on_the_line():
    points = [(0.0, 1.0), (10.0, 2.0), (20.0, 0.0)]
    assert [value_at(points, x) for x in (0.0, 5.0, 10.0, 15.0, 20.0)] == [1.0, 1.5, 2.0, 1.0, 0.0]
    assert value_at(points, 21.0) is None and value_at(points, -1.0) is None and value_at([], 0.0) is None
