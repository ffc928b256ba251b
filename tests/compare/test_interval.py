"""Intervals: as wide as few seeds demand, and found again bit for bit."""

from __future__ import annotations

import math
import random

import pytest

from hybridtrainer.compare.interval import Interval, paired_interval, student_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042), (1000, 1.962)],
)
def test_student_quantiles_are_within_one_percent(freedom, quantile):
    assert student_quantile(freedom) == pytest.approx(quantile, rel=0.01)


@pytest.mark.parametrize(("count", "least"), [(2, 0.89), (3, 0.92), (5, 0.92), (10, 0.92)])
def test_intervals_cover_the_truth_about_as_often_as_they_say(count, least, monkeypatch):
    monkeypatch.setattr("hybridtrainer.compare.interval.RESAMPLES", 1000)
    draw = random.Random(count)
    covered = 0
    for trial in range(500):
        found = paired_interval([draw.gauss(0.3, 1.0) for _ in range(count)], seed=trial)
        assert found.low is not None and found.high is not None
        covered += found.low <= 0.3 <= found.high
    assert least <= covered / 500 <= 0.985


def test_one_seed_has_no_interval():
    assert paired_interval([0.5]) == Interval(0.5, None, None)


def test_equal_differences_have_an_interval_without_width():
    assert paired_interval([0.1] * 7) == Interval(0.1, 0.1, 0.1)


def test_the_same_differences_give_the_same_interval():
    values = [0.1, 0.3, -0.2, 0.25, 0.4]
    assert paired_interval(values) == paired_interval(values)
    found = paired_interval(values)
    assert found.low is not None and found.high is not None
    assert found.low < found.mean < found.high
    assert found.mean == pytest.approx(0.17)


def test_more_seeds_make_it_narrower():
    few, many = paired_interval([0.0, 1.0] * 2), paired_interval([0.0, 1.0] * 20)
    assert few.high is not None and few.low is not None and many.high is not None and many.low is not None
    assert few.high - few.low > 3 * (many.high - many.low)


def test_an_increasing_function_maps_the_limits():
    assert Interval(0.0, -1.0, None).map(math.exp) == Interval(1.0, math.exp(-1), None)
