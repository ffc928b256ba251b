"""One trial: in turns it is the run it would be alone, and its log is all that is needed."""

from __future__ import annotations

import json

import pytest
from tests.compare.support import STEPS, arm

from hybridtrainer.compare.findings import FALLING_RATE
from hybridtrainer.compare.trial import Trial, read_result
from hybridtrainer.errors import RunFolderError
from hybridtrainer.observe.progress import Silence
from hybridtrainer.signals import StopRequest
from hybridtrainer.tasks import build_task


def trial(folder, **settings) -> Trial:
    return Trial(arm("plain", **settings), 3, folder, build_task, Silence(), lambda arm, digest: None)


def finished(folder, **settings) -> Trial:
    made = trial(folder, **settings)
    with made, StopRequest() as stop:
        while not made.advance(7, stop):
            pass
    return made


def test_it_goes_to_its_end_in_stretches_and_is_read_from_its_log(tmp_path):
    made = finished(tmp_path / "t")
    result = made.result()
    assert result is not None and result.status == "finished" and result.seed == 3
    assert set(result.curves) == {"accuracy", "loss"}
    points = result.curves["accuracy"].points
    assert [point.step for point in points] == list(range(2, STEPS + 1, 2))
    assert points[-1].backward_samples == 16 * STEPS and points[-1].seconds > points[0].seconds > 0
    assert result.curves["accuracy"].higher_is_better and not result.curves["loss"].higher_is_better


def test_before_its_end_there_is_no_result(tmp_path):
    made = trial(tmp_path / "t")
    assert made.result() is None
    with made, StopRequest() as stop:
        assert not made.advance(10, stop)
    assert made.result() is None
    whole = finished(tmp_path / "whole").result()
    resumed = finished(tmp_path / "t").result()
    assert whole is not None and resumed is not None
    for metric, curve in whole.curves.items():
        assert [p.value for p in resumed.curves[metric].points] == [p.value for p in curve.points]


def test_a_torn_last_line_is_no_end_and_a_damaged_one_is_said(tmp_path):
    finished(tmp_path / "t")
    log = tmp_path / "t" / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "end"
    log.write_bytes(b"".join(lines)[:-5])
    assert read_result(3, tmp_path / "t") is None
    again = finished(tmp_path / "t").result()
    assert again is not None and again.status == "finished"
    steps = [point.step for point in again.curves["loss"].points]
    assert steps == list(range(2, STEPS + 1, 2))  # the end is not evaluated a second time
    log.write_bytes(lines[0] + b"{broken\n" + b"".join(lines[1:]))
    with pytest.raises(RunFolderError, match="damaged line"):
        read_result(3, tmp_path / "t")


def test_the_trackers_that_are_asked_for_follow_it(tmp_path, monkeypatch):
    shown: list[str] = []

    class Follower:
        def write(self, kind, fields):
            shown.append(kind)

        def close(self):
            shown.append("closed")

    monkeypatch.setattr(
        "hybridtrainer.compare.trial.find_trackers", lambda names: [(name, lambda *_: Follower()) for name in names]
    )
    finished(tmp_path / "t", run={"trackers": ["tensorboard"]})
    assert shown.count("step") == STEPS and shown[-2:] == ["end", "closed"]


def test_a_trial_with_other_settings_is_not_taken_for_this_one(tmp_path):
    finished(tmp_path / "t")
    with pytest.raises(RunFolderError, match="holds a trial with other settings"):
        trial(tmp_path / "t", optimizer={"lr": 0.5}).result()


def test_a_log_that_lost_lines_is_not_gone_on_with(tmp_path):
    finished(tmp_path / "t")
    (tmp_path / "t" / "log.jsonl").write_bytes(b"")
    for _ in range(2):  # the folder is given free again each time
        with pytest.raises(RunFolderError, match="has lost lines"):
            finished(tmp_path / "t")


def test_a_metric_beyond_all_means_is_no_number(tmp_path):
    finished(tmp_path / "t")
    log = tmp_path / "t" / "log.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        if record["kind"] == "evaluation":
            record["loss"] = 1e308
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = read_result(3, tmp_path / "t")
    assert result is not None and result.curves["loss"].broken and not result.curves["accuracy"].broken


def jump(verdict, reason):
    return {"v": 1, "kind": "jump", "step": 5, "verdict": verdict, "reason": reason}


STEP = {"v": 1, "kind": "step", "step": 5, "reason": "confidence 0.20 is below 0.85"}


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([{"v": 1, "kind": "notice", "step": 0, "text": "no jumps: the rate falls"}, STEP], "the rate falls"),
        (
            [jump("accepted", "x"), jump("rolled back", "worse")],
            "of 1 that were tried the last was rolled back (worse)",
        ),
        ([STEP, STEP | {"reason": "100 warmup steps are done"}], STEP["reason"]),
        ([STEP, jump("kept", "better")], ""),
        ([], ""),
    ],
)
def test_why_no_jump_was_kept_is_read_from_the_log(tmp_path, records, why):
    end = {"v": 1, "kind": "end", "step": 6, "status": "finished"}
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*records, end]))
    result = read_result(3, tmp_path)
    assert result is not None and result.no_jump == why


def test_a_run_whose_rate_falls_says_that_it_made_no_jump_for_that(tmp_path):
    result = finished(tmp_path / "t", predict="auto", schedule={"name": "cosine", "warmup_steps": 0}).result()
    assert result is not None and FALLING_RATE in result.no_jump
