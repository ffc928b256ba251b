"""The text of a comparison: verdict first, figures, notes."""

from __future__ import annotations

from pathlib import Path

from tests.compare.test_findings import ARMS, SAME, document, times, trials
from tests.compare.test_verdict import rising

from hybridtrainer.compare.curve import Curve
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
    assert "0 of 2              -" in text and "Note: plain does not reach the target 2" in text


def test_the_time_to_the_target_is_that_of_the_mean_over_all_seeds():
    """Not of the seeds that got there: an arm of which one fails would look cheaper."""
    runs = trials(*[rising(seconds=1.0)] * 4, rising(seconds=6.0, top=0.75))
    result = findings(ARMS, {arm.name: runs for arm in ARMS}, None, 0.85, 0.0)
    (line,) = (line for line in summary(result, Path("x")).splitlines() if line.startswith("plain "))
    assert f"4 of 5{result['arms']['plain']['average']['seconds']:>13.1f} s" in line
    missed = findings(ARMS, {arm.name: [*runs[:2], runs[4]] for arm in ARMS}, None, 0.93, 0.0)
    (line,) = (line for line in summary(missed, Path("x")).splitlines() if line.startswith("plain "))
    assert "2 of 3              -" in line
    for arm in missed["arms"].values():
        del arm["average"]  # as old versions wrote it
    assert "2 of 3              -" in summary(missed, Path("x"))


def test_a_verdict_that_is_not_in_the_headline_has_its_sentence():
    made = {arm.name: trials(*map(rising, SAME)) for arm in ARMS}
    made["plain-averaged"] = trials(*[Curve(rising(top=0.5).points, True, diverged=True)] * 5, status="diverged")
    result = findings(ARMS, made, None, None, 0.0)
    lines = summary(result, Path("x")).splitlines()
    at = lines.index("hybrid against plain-averaged: no verdict")
    assert lines[at + 1].startswith("  No verdict: plain-averaged itself does not reach")
    assert [result["headline"] in line for line in lines].count(True) == 1


def test_a_ratio_that_some_samples_of_the_seeds_never_reach_begins_with_never():
    made = {arm.name: trials(*map(rising, SAME)) for arm in ARMS}
    made["hybrid"] = trials(*[rising(speed=3.0)] * 4, rising(top=0.75))
    text = summary(findings(ARMS, made, None, 0.9, 0.0), Path("x"))
    assert text.count("95% interval never to ") >= 4  # speed and compute, against both
    assert "0.000 to" not in text


def test_a_bound_is_called_one_and_rounded_down_and_no_ratio_stands_beside_it():
    made = {arm.name: trials(*[rising(top=0.8)] * 5) for arm in ARMS} | {"hybrid": trials(*[rising(speed=2.0)] * 5)}
    result = findings(ARMS, made, None, 0.9, 0.0)
    result["comparisons"][0]["at_least"] |= {"mean": 2.2899, "low": 2.1119}
    lines = summary(result, Path("x")).splitlines()
    at = lines.index("hybrid against plain: faster")
    assert " ".join(lines[at + 1].split()).startswith(
        "times as fast to the target, at least 2.289 95% interval 2.111 to 2."
    )
    assert lines[at + 2].startswith("  times less compute to the target, at least ")
    assert not any(line.startswith("  times as fast to the target  ") for line in lines)
    for comparison in result["comparisons"]:
        del comparison["at_least"], comparison["compute_at_least"]  # as old versions wrote it
    assert not any(line.startswith("  times") for line in summary(result, Path("x")).splitlines())
