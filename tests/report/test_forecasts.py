"""Forecasts of the loss beside what happened."""

from __future__ import annotations

from hybridtrainer.report.forecasts import coverage, forecasts

LINE = [(0.0, 5.0), (100.0, 4.0), (200.0, 3.0)]


def forecast(step, target, loss, wide=0.1):
    return {
        "kind": "forecast",
        "step": step,
        "target_step": target,
        "loss": loss,
        "low": loss - wide,
        "high": loss + wide,
    }


def test_short_and_final_forecasts_are_told_apart_and_held_against_what_happened():
    found = forecasts(
        [forecast(10, 50, 4.5), forecast(10, 200, 3.05), forecast(60, 100, 5.0), forecast(60, 200, 2.0)], LINE
    )
    assert [(known.target_step, known.actual, known.inside) for known in found.short] == [
        (50, 4.5, True), (100, 4.0, False),
    ]  # fmt: skip
    assert [(known.step, known.actual, known.inside) for known in found.final] == [(10, 3.0, True), (60, 3.0, False)]
    assert coverage(found.short) == (1, 2)


def test_what_the_run_has_not_reached_is_not_judged():
    found = forecasts([forecast(10, 300, 3.0), forecast(10, 150, 3.5)], LINE)
    assert found.final[0].actual is None and found.final[0].inside is None
    assert coverage(found.final) == (0, 0)


def test_records_with_holes_are_left_out_or_left_open():
    found = forecasts([{**forecast(10, 50, 4.5), "loss": "nan"}, {**forecast(10, 100, 4.0), "low": None}], LINE)
    assert found.short == [] and found.final[0].inside is None


def test_shortly_before_the_end_one_of_two_forecasts_of_it_is_enough():
    found = forecasts([forecast(180, 200, 3.0), forecast(180, 200, 3.1), forecast(200, 200, 3.0)], LINE)
    assert [(known.step, known.loss) for known in found.final] == [(180, 3.1)] and found.short == []


def test_a_forecast_that_names_its_window_is_held_against_the_mean_of_that_many_steps():
    steps = [{"kind": "step", "step": at, "loss": float(at), "predicted": 0} for at in range(1, 101)]
    jump = {"kind": "step", "step": 49, "loss": 1e6, "predicted": 3}  # a probe, no loss of the training
    records = [*steps, jump, {**forecast(40, 50, 48.0), "window": 5}, {**forecast(90, 140, 90.0), "window": 25}]
    found = forecasts([record for record in records if record is not steps[48]], LINE)
    assert found.short[0].actual == (46 + 47 + 48 + 50) / 4
    assert found.short[1].actual is None  # not reached
    assert found.final == []


def test_a_near_forecast_that_looks_beyond_the_end_is_not_taken_for_one_of_the_end():
    found = forecasts([forecast(10, 200, 3.05), {**forecast(190, 240, 3.0), "window": 25}], LINE)
    assert [known.target_step for known in found.final] == [200]
    assert [known.target_step for known in found.short] == [240]
