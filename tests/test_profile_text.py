"""A profile in words: figures where there are some, "unavailable" where there are none, the plan beside them."""

from __future__ import annotations

import json
from dataclasses import replace

from hybridtrainer.observe.against_plan import Actual, against_plan
from hybridtrainer.observe.profile_summary import ProfileReport, Summary
from hybridtrainer.observe.snapshots import Snapshot
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.profile_text import as_data, planned_and_measured, profile_text
from hybridtrainer.records import Planned

MIB = 1 << 20
PLAN = Estimate(
    {"weights": 100 * MIB, "optimizer states": 200 * MIB, "gradients": 100 * MIB, "activations": 500 * MIB,
     "workspace": 64 * MIB, "fragments": 36 * MIB},
    {}, 0, None, None,
)  # fmt: skip


def taken(step: int, peak: int, phase: str = "full") -> Snapshot:
    sizes = (100 * MIB, 200 * MIB, 100 * MIB)
    rest = peak * MIB - sum(sizes)
    return Snapshot(step, phase, step / 2, 400 * MIB, peak * MIB, 1250 * MIB, None, 9 * MIB, *sizes, rest)


def report() -> ProfileReport:
    summary = Summary(300 * MIB, 2500 * MIB, "a card")
    for step, peak in enumerate((700, 800, 1000), 1):
        summary.take(taken(step, peak))
    return summary.report()


def test_plan_and_measurement_stand_side_by_side_and_add_up():
    rows = planned_and_measured(report(), PLAN)
    assert rows == {
        "weights": (100 * MIB, 100 * MIB),
        "optimizer states": (200 * MIB, 200 * MIB),
        "gradients": (100 * MIB, 100 * MIB),
        "activations and other": (600 * MIB, 850 * MIB),
        "in all": (1000 * MIB, 1250 * MIB),
    }
    text = profile_text(report(), PLAN)
    line = next(line for line in text.splitlines() if line.startswith("in all"))
    assert line.split()[-3:] == ["1,000.0", "1,250.0", "-20.0%"]


def test_the_text_has_peaks_phases_and_spikes():
    text = profile_text(report(), "there is no reason")
    for words in (
        "3 steps in 1.5 s (2.00 a second), a card", "in use at the start 300.0 MiB, at the end 400.0 MiB",
        "peak 1,000.0 MiB at step 3, full", "50.0% of 2,500.0 MiB at most", "No plan beside it: there is no reason.",
        "3 steps were 100.0 MiB or more above the one before:", "+200.0 MiB to 1,000.0 MiB",
    ):  # fmt: skip
        assert words in text, words
    (row,) = [line for line in text.splitlines() if line.startswith("full")]
    assert row.split() == ["full", "3", "833.3", "1,000.0", "700.0", "100.0", "200.0", "100.0", "600.0"]


def test_many_spikes_are_counted_and_not_all_shown():
    summary = Summary(0)
    for step in range(1, 41):
        summary.take(taken(step, 500 + 500 * (step % 2)))
    text = profile_text(summary.report(), "")
    assert text.count("  step ") == 10 and "and 10 more" in text


def test_what_cannot_be_told_is_unavailable():
    empty = Summary().report()
    text = profile_text(empty, "none")
    assert "peak unavailable" in text and "at the start unavailable" in text and " 0.0 MiB" not in text


def test_as_data_it_is_json_with_plan_or_reason():
    assert json.loads(json.dumps(as_data(report(), "because")))["no_plan"] == "because"
    found = json.loads(json.dumps(as_data(report(), PLAN)))
    assert found["plan"]["in all"] == {"planned": 1000 * MIB, "measured": 1250 * MIB}
    assert found["phases"]["full"]["max_bytes"] == 1000 * MIB


def test_without_a_measurement_there_is_no_ratio():
    rows = planned_and_measured(replace(report(), reserved_peak_bytes=None, peak_phase=None), PLAN)
    assert rows["in all"] == (1000 * MIB, 0)


def test_host_memory_and_seconds_stand_beside_the_plan_too():
    against = against_plan(Planned("", 1000 * MIB, 50 * MIB, seconds=0.5), Actual(3, 0, 1250 * MIB, 50 * MIB, 0.4, 9))
    text = profile_text(report(), PLAN, against)
    lines = {line[:14].strip(): line.split() for line in text.splitlines()}
    assert lines["GPU memory"][-1] == "-20.0%" and lines["host memory"][-1] == "+0.0%"
    assert lines["seconds a step"][-5:] == ["400", "ms", "+25.0%", "(median", "of", "9)"][-5:]
    found = json.loads(json.dumps(as_data(report(), PLAN, against)))["against_plan"]
    assert [figure["planned"] for figure in found["figures"]] == [1000 * MIB, 50 * MIB, 0.5]
    assert as_data(report(), "because")["against_plan"] is None
