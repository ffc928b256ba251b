"""The result of a comparison as plain data."""

from __future__ import annotations

import json

import pytest
from tests.report.making import make_comparison, result

from hybridtrainer.errors import RunFolderError
from hybridtrainer.report.comparison import mean_curve, read_comparison, trial_curve


def test_a_whole_result_is_read(tmp_path):
    found = read_comparison(make_comparison(tmp_path))
    assert list(found.arms) == ["plain", "plain, averaged", "hybrid"]
    assert found.comparisons[0].speedup is not None and found.comparisons[0].speedup.per_seed[1] is None
    assert found.comparisons[1].compute is None
    assert found.tuning is not None and found.tuning.arms["plain"].candidates[2].seconds_to_target is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "damaged"),
        ("[" * 100_000, "damaged"),
        ("[]", "not the result"),
        ('{"kind": "run"}', "not the result"),
        (json.dumps({**result(), "v": 2}), "version 2"),
        (json.dumps({**result(), "v": "1"}), "version '1'"),
        (json.dumps({**result(), "arms": 3}), "damaged at arms"),
        (json.dumps({**result(), "comparisons": [{"arm": "x"}]}), "comparisons.0.baseline"),
    ],
)
def test_a_result_that_cannot_be_used_is_refused_with_what_to_do(tmp_path, text, said):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(RunFolderError, match=said) as caught:
        read_comparison(tmp_path)
    assert caught.value.remedy and caught.value.exit_code == 5


def test_numbers_that_are_not_finite_are_gaps(tmp_path):
    content = result()
    content["comparisons"][0]["speedup"] = {"mean": "nan", "low": "inf", "high": None, "per_seed": ["nan", 1.5]}
    content["arms"]["plain"]["trials"][0]["curve"][3]["value"] = "nan"
    found = read_comparison(make_comparison(tmp_path, content))
    speedup = found.comparisons[0].speedup
    assert speedup is not None and speedup.mean is None and speedup.low is None and speedup.per_seed == [None, 1.5]
    assert trial_curve(found.arms["plain"].trials[0], "step", smoothed=False)[3] == (80.0, None)


def test_the_mean_curve_ends_where_the_first_seed_ends(tmp_path):
    found = read_comparison(make_comparison(tmp_path))
    trials = found.arms["plain"].trials
    mean = mean_curve(trials, "seconds")
    ends = [max(x for x, y in trial_curve(trial, "seconds", smoothed=True) if y is not None) for trial in trials]
    assert mean[-1][0] == pytest.approx(min(ends)) and min(ends) < max(ends)
    level = mean_curve(trials, "step")
    heights = [trial_curve(trial, "step", smoothed=True)[-1][1] for trial in trials]
    assert level[-1][1] == pytest.approx(sum(h for h in heights if h is not None) / 5)
    assert mean_curve([], "step") == []
