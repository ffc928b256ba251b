"""The text of a comparison: verdict first, figures, notes."""

from __future__ import annotations

from pathlib import Path

from tests.compare.test_findings import ARMS, SAME, document, times, trials
from tests.compare.test_verdict import rising

from hybridtrainer.compare.findings import findings
from hybridtrainer.compare.summary import summary


def test_the_verdict_comes_first_and_every_arm_has_a_line():
    result = document(plain=SAME, averaged=SAME, hybrid=times(2.0))
    lines = summary(result, Path("runs/mine")).splitlines()
    assert lines[0] == result["headline"]
    assert [line.split()[0] for line in lines[4:7]] == ["plain", "plain-averaged", "hybrid"]
    assert "5 of 5" in lines[4]
    assert any("times as fast to the target" in line and "95% interval" in line for line in lines)
    assert lines[-1] == "Everything is in runs/mine."


def test_what_is_missing_is_a_dash():
    result = findings(ARMS, {arm.name: trials(rising(), rising()) for arm in ARMS}, None, 2.0, 0.0)
    text = summary(result, Path("x"))
    assert "0 of 2          -" in text and "Note: plain does not reach the target 2" in text
