"""What a real step is worth: the slope of the loss at the end of a run, from all of its newer half."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from statistics import fmean

import pytest

from hybridtrainer.phases.pace import LEAST_BINS, MIN_LOSSES, MOST_BINS, Course, progress_per_step

Curve = Callable[[float], float]
CURVES: dict[str, Curve] = {
    "1 / t": lambda t: 100 / t,
    "a root": lambda t: 3 / math.sqrt(t),
    "a logarithm": lambda t: 4 - 0.3 * math.log(t),
    "below zero": lambda t: -math.log(t),
}


def course_of(losses: list[float]) -> Course:
    course = Course()
    for loss in losses:
        course = course.add(loss)
    return course


def pace_of(losses: list[float], known: int = 200) -> float | None:
    return progress_per_step(course_of(losses), losses[-known:])


@pytest.mark.parametrize("steps", [1, 7, 64, 65, 1000, 12_345])
def test_bins_lose_no_loss_and_stay_few(steps):
    losses = [random.Random(step).uniform(1, 2) for step in range(steps)]
    course = course_of(losses)
    assert course.steps == steps and len(course.bins) <= MOST_BINS
    assert sum(count for _, count, _ in course.bins) == steps
    assert math.fsum(total for total, _, _ in course.bins) == pytest.approx(math.fsum(losses))
    assert sum(at for _, _, at in course.bins) == steps * (steps + 1) // 2
    assert all(count == course.width for _, count, _ in course.bins[:-1])


def test_a_course_survives_a_checkpoint():
    course = course_of([1 / step for step in range(1, 300)])
    assert Course.from_tree(json.loads(json.dumps(course.to_tree()))) == course


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
@pytest.mark.parametrize("steps", [300, 4000])
def test_the_pace_is_the_slope_at_the_end(curve, steps):
    slope = (curve(steps - 1) - curve(steps + 1)) / 2
    found = pace_of([curve(step) for step in range(1, steps + 1)])
    assert found is not None and 0.95 * slope < found < 1.35 * slope  # without noise the newest quarter speaks up


@pytest.mark.parametrize("steps", [300, 1000, 4000])
def test_noise_of_a_third_of_the_loss_changes_the_pace_by_less_than_the_half(steps):
    paces = []
    for seed in range(20):
        noise = random.Random(seed)
        found = pace_of([100 / step * (1 + 0.3 * noise.gauss(0, 1)) for step in range(1, steps + 1)])
        assert found is not None
        paces.append(found * steps * steps / 100)
    assert 1 < fmean(paces) < 1.4  # its error is added
    assert min(paces) > 0.7 and max(paces) < 2


def test_a_loss_that_begins_to_fall_faster_is_seen_at_once():
    losses = [5 - 0.001 * step for step in range(900)] + [4.1 - 0.02 * step for step in range(100)]
    assert pace_of(losses) == pytest.approx(0.01, rel=0.5)


def test_a_rising_or_flat_loss_has_no_pace():
    assert pace_of([1 + 0.1 * step for step in range(100)]) == 0
    assert pace_of([2.0] * 100) == pytest.approx(0, abs=1e-12)


def test_the_pace_of_too_few_losses_is_unknown():
    assert pace_of([]) is None
    assert pace_of([2.0] * MIN_LOSSES) is None  # of which half are new
    assert pace_of([2.0] * 3 * MIN_LOSSES) is not None


def test_what_was_before_a_new_level_is_forgotten_and_its_steps_are_not():
    course = course_of([5.0] * 400).anew()
    assert course.steps == 400 and progress_per_step(course, []) is None
    losses = [8 - 0.01 * step for step in range(100)]
    for loss in losses:
        course = course.add(loss)
    assert course.steps == 500 and len(course.bins) >= LEAST_BINS
    assert progress_per_step(course, losses) == pytest.approx(0.01, rel=0.2)
