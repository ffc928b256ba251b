from __future__ import annotations

import numpy as np

from hybridtrainer.predict.blend import Blend, softmax
from hybridtrainer.predict.curves import Array


def forecasts(*values: float) -> Array:
    return np.array(values, dtype=np.float64)


def test_before_anything_is_known_each_counts_as_it_is_trusted():
    np.testing.assert_allclose(Blend(forecasts(3, 1), 2).weights(), [[0.75, 0.25], [0.75, 0.25]])


def test_the_better_one_wins_and_the_other_can_come_back():
    blend = Blend(forecasts(1, 1, 1), 1)
    for _ in range(40):
        blend.learn(0, forecasts(1.0, 1.5, 2.0), came=1.0)
    assert blend.weights()[0, 0] > 0.95
    for _ in range(400):
        blend.learn(0, forecasts(1.0, 1.5, 2.0), came=2.0)
    assert blend.weights()[0, 2] > 0.95


def test_errors_of_long_ago_are_forgotten():
    blend = Blend(forecasts(1, 1, 1), 1)
    for came, times in ((1.0, 400), (2.0, 100)):
        for _ in range(times):
            blend.learn(0, forecasts(1.0, 1.5, 2.0), came)
    assert blend.weights()[0, 2] > 0.9


def test_far_forecasts_are_judged_by_near_ones_until_their_own_errors_are_known():
    blend = Blend(forecasts(1, 1), 3)
    for _ in range(30):
        blend.learn(0, forecasts(1.0, 2.0), came=1.0)
    weights = blend.weights()[:, 0]
    assert weights[2] > 0.8
    for _ in range(60):
        blend.learn(2, forecasts(1.0, 2.0), came=2.0)
    assert blend.weights()[2, 0] < 0.5 < blend.weights()[0, 0]


def test_one_wild_error_does_not_decide():
    blend = Blend(forecasts(1, 1, 1), 1)
    for _ in range(20):
        blend.learn(0, forecasts(1.0, 1.1, 1.2), came=1.0)
    before = blend.weights()
    blend.learn(0, forecasts(1e9, 1.1, 1.2), came=1.0)
    assert np.abs(blend.weights() - before).max() < 0.3


def test_equal_forecasts_are_no_reason_to_divide_by_zero():
    blend = Blend(forecasts(1, 1), 1)
    blend.learn(0, forecasts(1.0, 1.0), came=1.0)
    assert np.isfinite(blend.weights()).all()


def test_a_restored_blend_is_equal():
    blend, other = Blend(forecasts(1, 2), 2), Blend(forecasts(1, 2), 2)
    blend.learn(1, forecasts(1.0, 2.0), came=1.2)
    other.restore({name: tensor.clone() for name, tensor in blend.state().items()})
    assert np.array_equal(blend.weights(), other.weights())


def test_large_numbers_have_a_softmax_too():
    np.testing.assert_allclose(softmax(forecasts(1e4, 1e4, -1e4)), [0.5, 0.5, 0.0])
