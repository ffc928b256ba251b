"""What the page says of a comparison."""

from __future__ import annotations

import pytest
from tests.report.making import estimate, result

from hybridtrainer.report.comparison import Comparison
from hybridtrainer.report.comparison_sections import comparison_sections, comparison_verdict
from hybridtrainer.report.detail import Detail
from hybridtrainer.report.values import NOTHING


def sections(content):
    found = comparison_sections(0, Comparison.model_validate(content), Detail(1))
    return {section.title: section for section in found}


def test_the_verdict_is_that_of_the_result_with_every_warning():
    content = result(warnings=["one", "two"])
    verdict = comparison_verdict(Comparison.model_validate(content))
    assert verdict.text == content["headline"] and verdict.warnings == ["one", "two"]


@pytest.mark.parametrize(
    ("verdicts", "mood"),
    [(["faster"], "good"), (["faster", "not distinguishable"], "neutral"), (["quality lost"], "bad"),
     (["faster", "slower"], "bad"), ([], "neutral"), (["no verdict"], "neutral")],
)  # fmt: skip
def test_the_look_of_the_verdict_never_promises_more_than_the_verdicts(verdicts, mood):
    content = result(comparisons=[{"arm": "hybrid", "baseline": "plain", "verdict": known} for known in verdicts])
    assert comparison_verdict(Comparison.model_validate(content)).mood == mood


def test_a_sentence_that_begins_with_the_verdict_is_not_announced_by_it():
    content = result()
    content["comparisons"][0] |= {"verdict": "no verdict", "sentence": "No verdict: 2 seeds are too few."}
    parts = sections(content)["Speed and quality"].parts
    assert parts[0].texts == ["No verdict: 2 seeds are too few."]
    assert parts[1].texts == ["Verdict: not distinguishable."]


def test_each_comparison_has_all_five_measures_with_interval_and_seeds():
    first = sections(result())["Speed and quality"].parts[0]
    (table,) = first.tables
    assert table.columns == ["measure", "all seeds", "95% interval", *(f"seed {n}" for n in range(5))]
    assert list(table.rows[0][:3]) == ["times as fast to the target", "1.32", "1.20 to 1.44"]
    assert table.rows[0][4] == NOTHING
    assert [row[0] for row in table.rows][2:] == [
        "final accuracy, difference", "accuracy at equal time (25.0 s), difference",
        "accuracy at equal steps (600), difference",
    ]  # fmt: skip
    assert table.rows[2][1] == "+0.0040"
    assert first.figures[0].svg.count('"p square') == 4 and first.figures[0].svg.count('"p diamond') == 1


def test_missing_measures_and_too_few_seeds_are_shown_as_missing():
    content = result(seeds=1)
    content["comparisons"][0]["speedup"] = {**estimate(1.2, 0.1, 1), "low": None, "high": None}
    parts = sections(content)["Speed and quality"].parts
    assert parts[0].tables[0].rows[0][2] == NOTHING
    assert set(parts[1].tables[0].rows[1][1:]) == {NOTHING}


def test_quality_is_drawn_for_each_seed_and_as_a_mean_with_the_target():
    for figure in sections(result())["Quality"].figures:
        assert figure.svg.count('"line thin') == 15 and figure.svg.count('"line bold') == 3
        assert "target 0.8950" in figure.svg
    assert "target" not in sections(result(target={"value": None, "origin": ""}))["Quality"].figures[0].svg


def test_compute_tuning_and_settings_are_there():
    found = sections(result())
    assert list(found["Compute"].tables[0].rows[0][:4]) == ["plain", "baseline", "9,602", "9,600"]
    assert len(found["Compute"].folded[0].rows) == 15
    assert "optimizer.lr = 0.002" in found["Tuning"].tables[0].rows[0][1]
    assert [row[0] for row in found["Tuning"].folded[0].rows] == ["", "chosen", ""]
    assert [list(row) for row in found["Settings"].tables[0].rows] == [["predict", "off", "off", "auto"]]
    untuned = sections(result(tuned=False, tuning=None))
    assert "Nothing was tuned" in untuned["Tuning"].texts[0]


def test_many_seeds_share_a_column_and_diverged_trials_are_told():
    content = result(seeds=15)
    content["arms"]["plain"]["trials"][0] |= {"status": "diverged", "reason": "loss nan", "final": None, "curve": []}
    found = sections(content)
    assert found["Speed and quality"].parts[0].tables[0].columns[-1] == "seeds"
    assert "diverged: loss nan" in found["Compute"].folded[0].rows[0]


def test_the_diamond_of_speed_is_not_called_the_mean_of_the_squares():
    speed, final = sections(result())["Speed and quality"].parts[0].figures
    assert "diamond: the ratio on the curves averaged over the seeds" in speed.note
    assert "target not reached" in speed.svg and "no value" not in speed.svg
    assert [row[1] for row in speed.table.rows].count("target not reached") == 1
    assert "diamond: their mean" in final.note


def test_a_ratio_that_some_samples_never_reach_begins_with_never():
    content = result()
    content["comparisons"][0]["speedup"]["low"] = 0.0
    content["comparisons"][0]["final_quality"]["low"] = 0.0
    part = sections(content)["Speed and quality"].parts[0]
    assert part.tables[0].rows[0][2] == "never to 1.44" and part.tables[0].rows[2][2].startswith("+0.0000 to")
    assert part.figures[0].table.rows[-1][1].startswith("never to") and "never to 1.44" in part.figures[0].svg
    assert "never" not in part.figures[1].svg


def test_the_way_to_the_target_is_that_of_the_average_run():
    content = result()
    content["arms"]["plain"]["average"] = {
        "step": 300,
        "seconds": 15.5,
        "forward_samples": 5000.4,
        "backward_samples": 40,
    }
    content["arms"]["hybrid"]["average"] = None
    table = sections(content)["Compute"].tables[0]
    assert list(table.columns[4:]) == [
        "forward, average run to target", "backward, average run to target", "time, average run to target",
        "seeds that reached it",
    ]  # fmt: skip
    assert list(table.rows[0][4:7]) == ["5,000", "40", "15.5 s"]
    assert list(table.rows[1][4:7]) == list(table.rows[2][4:7]) == [NOTHING] * 3  # as in an old result, and not reached
    assert table.rows[2][7].endswith(" of 5")


def test_a_bound_is_called_one_and_rounded_down_in_table_and_chart():
    content = result()
    content["comparisons"][0] |= {
        "speedup": None, "compute": None, "compute_at_least": {**estimate(3.0, 0.1, 5), "mean": 2.999},
        "at_least": {"mean": 2.2899, "low": 2.1188, "high": 2.5, "per_seed": [2.399, None, 2.0, 2.1, 2.2]},
    }  # fmt: skip
    part = sections(content)["Speed and quality"].parts[0]
    speed, compute = part.tables[0].rows[:2]
    shown = ["times as fast to the target, at least", "2.28", "2.11 to 2.50", "2.39", NOTHING, "2.00", "2.10", "2.20"]
    assert list(speed) == shown
    assert list(compute[:2]) == ["times less compute to the target, at least", "2.99"]
    assert "At least: plain does not reach the target" in part.tables[0].note
    assert "at least" in part.figures[0].svg and part.figures[0].table.rows[-1][1].startswith("2.110 to")
    assert "t least" not in str(sections(result())["Speed and quality"])
