"""When a target counts as reached, and what was reached when."""

from __future__ import annotations

import math

import pytest

from hybridtrainer.compare.curve import HOLD, WINDOW, Curve, Point


def curve(*values: float, higher_is_better: bool = True) -> Curve:
    points = (Point(10 * (i + 1), 2.0 * (i + 1), value, 100 * i, 50 * i) for i, value in enumerate(values))
    return Curve(tuple(points), higher_is_better)


def test_smoothing_is_a_trailing_mean_that_needs_a_full_window():
    smoothed = curve(*range(8)).smoothed
    assert [point.value for point in smoothed] == [2.0, 3.0, 4.0, 5.0]
    assert [point.step for point in smoothed] == [50, 60, 70, 80]


def test_a_lucky_hit_is_not_reaching():
    lucky = [0.0] * 6 + [5.0] + [0.0] * 20  # the mean of five touches 1.0 and does not stay
    assert curve(*lucky).reached(1.0) is None
    assert curve(*lucky, *[1.0] * 10).reached(1.0) is not None


def test_reaching_counts_from_where_it_lasts():
    early = [0.0] * 5 + [1.0] * 5 + [0.0] * 5 + [1.0] * 12
    reached = curve(*early).reached(1.0)
    assert reached is not None
    assert reached.step == 10 * 20  # the fifth of the second ones


def test_it_must_last_for_a_whole_window_of_smoothed_values():
    values = [1.0] * (WINDOW + HOLD - 1)
    assert curve(*values, *[0.0] * 10).reached(1.0) is None
    assert curve(*values, 1.0, *[0.0] * 10).reached(1.0) is not None


def test_at_the_end_of_a_run_what_is_left_decides():
    assert curve(*[0.0] * 10, *[1.0] * WINDOW).reached(1.0) is not None
    assert curve(*[0.0] * 10, *[1.0] * WINDOW, 0.0).reached(1.0) is None


def test_the_moment_is_interpolated_in_every_clock():
    reached = curve(*range(20)).reached(5.5)
    assert reached is not None
    # the smoothed value is 5 at the 8th evaluation and 6 at the 9th
    assert (reached.step, reached.seconds) == (85, 17)
    assert (reached.forward_samples, reached.backward_samples) == (750, 375)
    assert reached.compute == 750 + 2 * 375


def test_loss_counts_downward():
    falling = curve(*reversed(range(20)), higher_is_better=False)
    reached = falling.reached(5.5)
    assert reached is not None
    assert reached.step == 165
    assert falling.reached(-1.0) is None


def test_a_value_that_is_not_finite_never_meets_a_target():
    values = [1.0] * 12 + [math.nan] * 3 + [1.0] * 12
    broken = curve(*values)
    assert broken.reached(1.0) == broken.smoothed[0]
    assert curve(*[math.nan] * 20).reached(0.0) is None
    after = curve(*[math.nan] * 6, *[1.0] * 12).reached(0.5)
    assert after is not None and after.step == 110  # no interpolation from a NaN


def test_the_first_smoothed_value_can_be_it():
    assert curve(*[1.0] * 20).reached(0.5) == curve(*[1.0] * 20).smoothed[0]


@pytest.mark.parametrize(("moment", "value"), [(49, None), (50, 2.0), (55, 2.5), (80, 5.0), (1000, 5.0)])
def test_quality_at_a_step(moment, value):
    assert curve(*range(8)).at(moment, lambda point: point.step) == value


def test_quality_at_a_second():
    assert curve(*range(8)).at(11.0, lambda point: point.seconds) == 2.5


def test_too_few_evaluations_have_no_end():
    short = curve(1.0, 1.0)
    assert short.final() is None and short.reached(0.5) is None and short.at(10, lambda point: point.step) is None
