from __future__ import annotations

import json
import math

import pytest

from hybridtrainer.predict.coefficients import Fit
from hybridtrainer.predict.gain import LEAST_WINDOWS, Gain

TOO_FAR = Fit(along=0.1, length=0.2)


def judged(said: float, windows: int, fit: Fit = TOO_FAR) -> Gain:
    gain = Gain()
    for _ in range(windows):
        gain.say(math.log(said))
        gain.judge(fit)
    gain.say(math.log(said))
    return gain


def test_a_factor_is_used_once_it_has_been_better_for_some_windows():
    assert judged(0.5, LEAST_WINDOWS - 1).factor() == 1
    assert judged(0.5, LEAST_WINDOWS).factor() == pytest.approx(0.5)


@pytest.mark.parametrize("said", [1.5, 0.01])
def test_a_factor_that_made_forecasts_worse_is_not(said):
    fit = Fit(along=0.3, length=0.3)  # as far as it should
    assert judged(said, 20, fit).factor() == 1


def test_what_was_right_long_ago_counts_little():
    gain = judged(0.5, 50)
    for _ in range(40):
        gain.say(math.log(0.5))
        gain.judge(Fit(along=0.4, length=0.2))  # twice as far would have been right
    assert gain.factor() == 1


def test_its_state_is_plain_and_comes_back_exactly():
    gain, other = judged(0.7, 7), Gain()
    other.restore(json.loads(json.dumps(gain.state())))
    assert other.state() == gain.state() and other.factor() == gain.factor()
