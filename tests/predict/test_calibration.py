from __future__ import annotations

import torch

from hybridtrainer.predict.calibration import LEVELS, REMEMBERED, Calibration


def errors(count: int, scale: float = 1.0, seed: int = 0) -> list[float]:
    return (scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))).tolist()


def covered(calibration: Calibration, values: list[float]) -> float:
    held = 0
    for error in values:
        held += abs(error) <= calibration.reach()
        calibration.learn(error)
    return held / len(values)


def test_before_any_error_the_forecasters_own_scale_is_believed():
    assert 1.2 < Calibration().reach() < 2.0  # a normal distribution has 1.64
    assert Calibration().expected_error() is None


def test_nine_tenths_hold_even_where_the_scale_is_wrong_by_a_factor():
    for scale in (0.2, 1.0, 4.0):
        calibration = Calibration()
        covered(calibration, errors(60, scale))
        assert 0.86 < covered(calibration, errors(1000, scale, seed=1)) < 0.94


def test_nine_tenths_hold_even_where_errors_resemble_their_neighbours():
    drawn, error, value = errors(2000), [], 0.0
    for each in drawn:
        value = 0.9 * value + each
        error.append(value)
    assert 0.87 < covered(Calibration(), error) < 0.93


def test_what_was_long_ago_is_forgotten():
    calibration = Calibration()
    covered(calibration, errors(100, 10.0))
    wide = calibration.reach()
    covered(calibration, errors(3 * REMEMBERED, 1.0))
    assert calibration.reach() < wide / 3


def test_a_calibrated_forecaster_has_a_small_expected_error_and_another_a_large_one():
    good, bad = Calibration(), Calibration(pace=0.0)
    covered(good, errors(500))
    for _ in range(30):
        bad.learn(0.0)  # intervals far too wide
    small, large = good.expected_error(), bad.expected_error()
    assert small is not None
    assert large is not None
    assert 0 <= small < 0.05
    assert 0.3 < large <= max(LEVELS)


def test_chances_follow_the_errors():
    calibration = Calibration()
    covered(calibration, errors(80))
    assert calibration.chance_below(0.0) == 0.5
    assert calibration.chance_below(-3.0) < 0.05
    assert calibration.chance_below(3.0) > 0.95
    assert abs(calibration.chance_below(1.0) + calibration.chance_below(-1.0) - 1) < 1e-12


def test_an_error_that_is_no_number_is_left_out():
    calibration = Calibration()
    calibration.learn(float("nan"))
    assert calibration.reach() == Calibration().reach()


def test_a_restored_calibration_is_equal():
    one, other = Calibration(), Calibration()
    covered(one, errors(50))
    other.restore(one.state())
    assert covered(one, errors(50, seed=2)) == covered(other, errors(50, seed=2))
    assert one.state() == other.state()
