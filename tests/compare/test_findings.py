"""The document of a comparison: headline, warnings, every trial."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.compare.support import arm
from tests.compare.test_verdict import rising

from hybridtrainer.compare.curve import Curve
from hybridtrainer.compare.findings import choose_metric, findings
from hybridtrainer.compare.trial import TrialResult
from hybridtrainer.errors import ConfigError
from hybridtrainer.phases.policy import start, unless_rate_falls

ARMS = [arm("plain", "baseline"), arm("plain-averaged", "baseline"), arm("hybrid", predict="auto")]


def trials(*curves: Curve, jumps: int = 3, status: str = "finished") -> list[TrialResult]:
    return [
        TrialResult(seed, Path(f"trials/x-seed{seed}"), status, "", {"accuracy": curve}, 1.5, jumps)  # type: ignore[arg-type]
        for seed, curve in enumerate(curves)
    ]


def document(**speeds: list[float]) -> dict[str, object]:
    names = {"plain": "plain", "averaged": "plain-averaged", "hybrid": "hybrid"}
    made = {names[name]: trials(*(rising(speed=speed) for speed in values)) for name, values in speeds.items()}
    return findings(ARMS, made, None, None, 0.002)


SAME = [1.0, 1.01, 0.99, 1.02, 0.98]


def times(factor: float) -> list[float]:
    return [factor * speed for speed in SAME]


def test_the_headline_is_the_verdict_against_the_strongest_baseline():
    found = document(plain=SAME, averaged=times(1.5), hybrid=times(1.5))
    assert [c["verdict"] for c in found["comparisons"]] == ["faster", "not distinguishable"]  # type: ignore[attr-defined]
    assert "plain-averaged" in str(found["headline"]) and "cannot be told apart" in str(found["headline"])
    found = document(plain=times(2.0), averaged=SAME, hybrid=times(1.5))
    assert str(found["headline"]).startswith("hybrid loses quality against plain and does not reach accuracy")


def test_a_baseline_that_reaches_the_target_is_stronger_than_one_that_only_bounds():
    made = {"plain": trials(*[rising(top=0.5)] * 5), "plain-averaged": trials(*map(rising, SAME))}
    found = findings(ARMS, made | {"hybrid": trials(*map(rising, SAME))}, None, 0.9, 0.0)
    assert [c["verdict"] for c in found["comparisons"]] == ["faster", "not distinguishable"]
    assert "at least" in found["comparisons"][0]["sentence"] and "at least" not in found["headline"]


@pytest.mark.parametrize("better", ["plain", "plain-averaged"])
def test_where_no_baseline_reaches_the_target_the_one_that_ends_best_is_the_strongest(better):
    made = {name: trials(*[rising(top=0.88 if name == better else 0.6)] * 5) for name in ("plain", "plain-averaged")}
    found = findings(ARMS, made | {"hybrid": trials(*[rising(speed=2.0)] * 5)}, None, 0.9, 0.0)
    assert "at least" in found["headline"] and f"as fast as {better} to" in found["headline"]
    falling = {
        name: [replace(trial, curves={"loss": _upside_down(trial.curves["accuracy"])}) for trial in of]
        for name, of in (made | {"hybrid": trials(*[rising(speed=2.0)] * 5)}).items()
    }
    assert f"as fast as {better} to" in findings(ARMS, falling, "loss", 0.1, 0.0)["headline"]


def _upside_down(curve: Curve) -> Curve:
    return Curve(tuple(replace(point, value=1 - point.value) for point in curve.points), False)


def test_it_is_json_and_has_every_trial_with_its_curve():
    found = document(plain=SAME, averaged=SAME, hybrid=SAME)
    again = json.loads(json.dumps(found))
    trial = again["arms"]["hybrid"]["trials"][2]
    assert trial["seed"] == 2 and trial["folder"] == "trials/x-seed2" and trial["evaluation_seconds"] == 1.5
    assert len(trial["curve"]) == 50 and trial["curve"][3]["smoothed"] is None and trial["curve"][4]["smoothed"]
    assert again["target"]["origin"] == "median of plain at 90% of its run, less 0.2%"
    assert again["seeds"] == [0, 1, 2, 3, 4]


def test_what_weakens_a_verdict_is_said():
    few = document(plain=[1.0, 1.1], averaged=[1.0, 1.1], hybrid=[1.0, 1.1])
    assert "2 seeds are few" in str(few["warnings"])
    made = {arm.name: trials(*map(rising, SAME), jumps=0) for arm in ARMS}
    assert "hybrid kept no jump" in str(findings(ARMS, made, None, None, 0.0)["warnings"])
    short = {arm.name: trials(*(rising(evaluations=12) for _ in SAME)) for arm in ARMS}
    assert "fewer than 20 evaluations" in str(findings(ARMS, short, None, None, 0.0)["warnings"])


def test_the_average_run_has_its_own_way_to_the_target():
    runs = trials(rising(seconds=1.0), rising(seconds=1.0), rising(seconds=4.0, top=0.75))
    made = {"plain": runs, "plain-averaged": trials(*[rising(top=0.5)] * 3), "hybrid": runs}
    found = findings(ARMS, made, None, 0.85, 0.0)
    average, alone = found["arms"]["plain"]["average"], found["arms"]["plain"]["trials"][0]["reached"]
    assert [trial["reached"] is None for trial in found["arms"]["plain"]["trials"]] == [False, False, True]
    assert set(average) == set(alone)
    assert average["seconds"] == pytest.approx(2 * average["step"]) and average["seconds"] > 2 * alone["seconds"]
    assert found["arms"]["plain-averaged"]["average"] is None


def test_one_seed_is_said_to_be_few():
    assert str(document(plain=[1.0], averaged=[1.0], hybrid=[1.0])["warnings"]).count("1 seed is few") == 1


def test_an_arm_that_made_no_jump_is_told_why_and_only_if_it_was_to_jump():
    jumping = [arm("first", "baseline", predict="auto"), arm("off"), arm("other", predict="auto")]
    falls = unless_rate_falls(start(jumping[2].config), jumping[2].config, 0.05).off
    made = {
        known.name: [replace(trial, no_jump=falls) for trial in trials(*map(rising, SAME), jumps=0)]
        for known in jumping
    }
    (told,) = (text for text in findings(jumping, made, None, None, 0.0)["warnings"] if "kept no jump" in text)
    assert told.startswith("other kept no jump") and "will fall to 5% of its peak" in told
    assert "--set schedule.name=constant" in told and """--set 'predict=["jumps"]'""" in told
    made["other"] = [replace(trial, no_jump="confidence 0.20 is below 0.85") for trial in made["other"]]
    (told,) = (text for text in findings(jumping, made, None, None, 0.0)["warnings"] if "kept no jump" in text)
    assert told.endswith("Its log says: confidence 0.20 is below 0.85.")


def test_a_lowered_interval_of_evaluations_is_said():
    asked = [replace(known, asked_interval=100) for known in ARMS]
    made = {known.name: trials(*map(rising, SAME)) for known in ARMS}
    warnings = str(findings(asked, made, None, None, 0.0)["warnings"])
    assert "Evaluations were made every 2 steps, not every 100 as configured" in warnings
    same = [replace(known, asked_interval=2) for known in ARMS]
    assert "as configured" not in str(findings(same, made, None, None, 0.0)["warnings"])


def test_the_origin_of_the_target_says_who_gave_it_and_what_was_added():
    made = {known.name: trials(*map(rising, SAME)) for known in ARMS}
    assert findings(ARMS, made, None, 0.5, 0.0, "that of the task x")["target"]["origin"] == "that of the task x"
    falling = Curve(tuple(replace(point, value=1 - point.value) for point in rising().points), False)
    losses = [replace(trial, curves={"loss": falling}) for trial in made["plain"]]
    found = findings(ARMS, {known.name: losses for known in ARMS}, None, None, 0.002)
    assert found["target"]["origin"] == "median of plain at 90% of its run, plus 0.2%"


def test_a_target_out_of_reach_is_said_with_what_was_reached():
    made = {arm.name: trials(*map(rising, SAME)) for arm in ARMS}
    found = findings(ARMS, made, None, 0.9999, 0.0)
    assert found["comparisons"][0]["verdict"] == "no verdict"
    assert "plain does not reach the target 0.9999: its median run ends at 0.9" in str(found["warnings"])
    assert "needs no new training" in str(found["warnings"])


def test_accuracy_decides_where_it_is_measured_unless_another_is_asked_for():
    both = [TrialResult(0, Path(), "finished", "", {"accuracy": rising(), "loss": rising()}, 0, 0)]
    assert choose_metric(both, None) == "accuracy" and choose_metric(both, "loss") == "loss"
    only = [TrialResult(0, Path(), "finished", "", {"loss": rising()}, 0, 0)]
    assert choose_metric(only, None) == "loss"
    with pytest.raises(ConfigError, match="these runs measured loss"):
        choose_metric(only, "accuracy")


def test_a_trial_that_diverged_at_once_has_no_curve_and_a_reason():
    made = {arm.name: trials(*map(rising, SAME)) for arm in ARMS}
    made["hybrid"] = [TrialResult(s, Path("x"), "diverged", "loss is nan", {}, 0.0, 0) for s in range(5)]
    found = findings(ARMS, made, None, None, 0.0)
    assert found["comparisons"][0]["verdict"] == "quality lost"
    assert "hybrid diverged in 5 of 5 seeds: loss is nan" in found["warnings"]
    assert found["arms"]["hybrid"]["trials"][0]["curve"] == []
