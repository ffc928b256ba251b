"""When forecasts are told: in time, behind real steps, and the same after a resume."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from hybridtrainer.observe.lookout import Lookout
from hybridtrainer.records import JumpRecord, LossForecast, Phase, PhaseChange, StepResult


def step(number: int, predicted: int = 0, loss: float | None = None) -> StepResult:
    value = 2 + 3 * number**-0.5 if loss is None else loss
    return StepResult(number, Phase.FULL, value, predicted, None, 0.1, "")


def told_by(records: list[StepResult], steps: int = 1000) -> list[LossForecast]:
    told: list[LossForecast] = []
    lookout = Lookout(steps, told.append)
    for record in records:
        lookout.record(record)
    return told


def test_two_forecasts_are_told_every_fiftieth_of_the_run():
    told = told_by([step(number) for number in range(1, 1001)])
    assert [forecast.step for forecast in told[::2]] == list(range(60, 1000, 20))
    assert [forecast.target_step for forecast in told[::2]] == [min(1000, at + 50) for at in range(60, 1000, 20)]
    assert {forecast.target_step for forecast in told[1::2]} == {1000}


def test_a_short_run_is_looked_at_every_ten_steps():
    told = told_by([step(number) for number in range(1, 61)], steps=60)
    assert [forecast.step for forecast in told[::2]] == [20, 30, 40, 50]


def test_a_jump_over_the_moment_is_followed_by_a_forecast_at_the_next_real_step():
    records = [step(number) for number in range(1, 96)] + [step(105, predicted=10, loss=99.0)]
    assert [forecast.step for forecast in told_by(records)] == [60, 60, 80, 80]
    told = told_by([*records, step(106), step(107)])
    assert [forecast.step for forecast in told[4:]] == [106, 106]
    assert told[-1].loss < 3  # the loss of a probe is none of the training


def test_a_clock_that_goes_back_is_told_again_when_it_comes_there_again():
    records = [step(number) for number in (*range(1, 103), 98, 99, 100, 101)]
    assert [forecast.step for forecast in told_by(records)][::2] == [60, 80, 100, 100]


@pytest.mark.parametrize("at", [59, 60, 61, 487, 980])
def test_after_a_resume_the_same_is_told(at):
    records = [step(n) for n in (*range(1, 300), *range(290, 400))]
    records += [step(415, predicted=15), *(step(n) for n in range(416, 1001))]
    whole = told_by(records)
    log: list[dict[str, Any]] = [{"kind": "phase"}, *({"kind": "step", **asdict(record)} for record in records[:at])]
    told: list[LossForecast] = []
    lookout = Lookout(1000, told.append, clock=records[at - 1].step)
    lookout.replay([*log, {"kind": "resume"}])
    assert told == []
    for record in records[at:]:
        lookout.record(record)
    assert told == whole[len(told_by(records[:at])) :]


def test_other_records_are_passed_over():
    told: list[LossForecast] = []
    lookout = Lookout(100, told.append)
    lookout.record(JumpRecord(3, 15, "line_fit", 0.9, "kept", "because"))
    lookout.record(PhaseChange(3, Phase.WARMUP, Phase.FULL, "because"))
    assert told == []


def test_a_run_whose_past_is_not_known_begins_where_it_stands():
    told: list[LossForecast] = []
    lookout = Lookout(1000, told.append, clock=500)
    for number in range(501, 600):
        lookout.record(step(number))
    assert told[0].step == 540


def test_where_the_trainer_forecasts_itself_only_the_end_is_told_also_after_a_resume():
    told: list[LossForecast] = []
    lookout = Lookout(1000, told.append)
    lookout.record(LossForecast(50, 100, 2.4, 2.3, 2.5, window=25))
    for number in range(1, 101):
        lookout.record(step(number))
    assert [(forecast.step, forecast.target_step) for forecast in told] == [(60, 1000), (80, 1000), (100, 1000)]
    resumed: list[LossForecast] = []
    lookout = Lookout(1000, resumed.append, clock=90)
    log: list[dict[str, Any]] = [{"kind": "step", **asdict(step(number))} for number in range(1, 91)]
    lookout.replay([{"kind": "forecast", **asdict(LossForecast(50, 100, 2.4, 2.3, 2.5, window=25))}, *log])
    for number in range(91, 101):
        lookout.record(step(number))
    assert resumed == told[-1:]
