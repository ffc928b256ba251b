"""How much a page shows of each thing."""

from __future__ import annotations

import pytest

from hybridtrainer.report.detail import Detail, phase_bands
from hybridtrainer.report.story import Stretch


def test_more_runs_and_a_smaller_factor_mean_less_of_each():
    assert Detail(1).points > Detail(20).points > Detail(20, 0.25).points > 0
    assert not Detail(1).brief and Detail(1, 0.0).brief


def test_few_phases_are_drawn_as_they_are():
    bands, gathered = phase_bands([Stretch(0, 60, "warmup"), Stretch(60, 90, "full")], 10, unit=60.0)
    assert not gathered and [(band.begin, band.end, band.style) for band in bands] == [
        (0, 1, "phase-warmup"), (1, 1.5, "phase-full"),
    ]  # fmt: skip


def test_too_many_phases_are_gathered_and_no_share_is_lost():
    stretches = [
        Stretch(at * 10.0 + begin, at * 10.0 + end, phase)
        for at in range(1000)
        for begin, end, phase in ((0, 9, "full"), (9, 10, "predict"))
    ]
    bands, gathered = phase_bands(stretches, 90)
    assert gathered and len(bands) <= 90
    area = sum((band.end - band.begin) * (band.high - band.low) for band in bands if band.style == "phase-predict")
    assert area == pytest.approx(1000)
