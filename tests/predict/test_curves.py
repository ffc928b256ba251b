from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from hybridtrainer.predict.curves import HORIZONS, LEAST_LOSSES, MOST_BINS, NAMES, Experts, LossCurve, target_window
from hybridtrainer.tree import pack, unpack


def follow(losses, first: int = 1) -> LossCurve:
    curve = LossCurve()
    for step, loss in enumerate(losses, first):
        curve.add(step, loss)
    return curve


def experts_of(curve: LossCurve) -> Experts:
    found = curve.experts()
    assert found is not None
    return found


def law(step: float) -> float:
    return 1.5 + 4 / math.sqrt(step)


def noisy(steps: int, seed: int = 0) -> list[float]:
    noise = torch.randn(steps, generator=torch.Generator().manual_seed(seed)).tolist()
    return [law(step) + 0.05 * noise[step - 1] for step in range(1, steps + 1)]


def test_a_power_law_is_continued_exactly_by_those_who_know_it():
    losses = experts_of(follow(law(step) for step in range(1, 301))).losses
    for q, horizon in enumerate(HORIZONS):
        came = law(300 + horizon - (target_window(horizon) - 1) / 2)
        for name in ("law_0.4", "fading_8", "mixture_0.3", "mixture_0.4"):
            assert abs(losses[q, NAMES.index(name)].item() - came) < 1e-3, name


def test_levels_stay_and_lines_go_on():
    experts = experts_of(follow(10 - 0.01 * step for step in range(1, 201)))
    level, line = (experts.losses[:, NAMES.index(name)].tolist() for name in ("level_10", "line_50"))
    assert level == pytest.approx([8 + 0.045] * 3)
    middles = [h - (target_window(h) - 1) / 2 for h in HORIZONS]
    assert line == pytest.approx([8 - 0.01 * middle for middle in middles])


def test_nothing_is_forecast_from_too_few_losses():
    assert follow([1.0] * (LEAST_LOSSES - 1)).experts() is None
    assert follow([1.0] * LEAST_LOSSES).experts() is not None


def test_a_clock_that_goes_back_undoes_what_came_after():
    losses = noisy(120)
    curve, other = follow(losses[:100]), follow(losses[:90])
    for step in range(91, 101):
        curve.add(step, 99.0 + step)
    for each in (curve, other):
        for step, loss in enumerate(losses[90:], 91):
            each.add(step, loss)
    np.testing.assert_allclose(experts_of(curve).losses, experts_of(other).losses, rtol=1e-9, atol=1e-9)


def test_memory_does_not_grow_with_the_run():
    curve = follow(noisy(4 * MOST_BINS + 100))
    assert len(curve.state()["bins"]) <= MOST_BINS
    came = law(4 * MOST_BINS + 100 + 3)
    assert abs(experts_of(curve).losses[0, NAMES.index("mixture_0.4")].item() - came) < 0.03


def test_forecasts_never_leave_the_range_of_a_run_nor_fall_below_zero():
    steep = follow([math.exp(-step / 10) for step in range(60)])
    losses = experts_of(steep).losses
    assert losses.min() >= 0 and losses.max() <= 2 + 1e-9
    assert steep.floor() == 0
    assert follow([-1.0] * 30).floor() == -math.inf


def test_losses_that_never_change_are_forecast_as_they_are():
    experts = experts_of(follow([2.0] * 50))
    np.testing.assert_allclose(experts.losses, 2.0)
    assert experts.spread > 0


def test_a_mean_is_told_only_of_steps_that_have_all_passed():
    curve = follow([1.0, 2.0, 3.0, 4.0])
    assert curve.mean(1, 3) == 2.5
    assert curve.mean(2, 5) is None
    curve.add(10, 5.0)  # a jump
    assert curve.mean(5, 9) is None


def test_a_restored_curve_goes_on_to_the_bit():
    curve, other = follow(noisy(700)), LossCurve()
    tensors, document = pack(curve.state())
    other.restore(unpack(json.loads(json.dumps(document)), tensors.__getitem__))
    for each in (curve, other):
        each.add(701, 1.7)
    assert np.array_equal(experts_of(curve).losses, experts_of(other).losses)
