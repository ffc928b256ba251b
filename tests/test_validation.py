"""The validation's rows are configurations that exist, and a row says what it should."""

from __future__ import annotations

import re

import pytest
from benchmarks.record import result
from benchmarks.validation import charts, promises, results, tables
from benchmarks.validation.rows import EAGER, ROWS, Row, merged, seeded
from benchmarks.validation.train import train

from hybridtrainer.config_io import parse_config


@pytest.mark.parametrize("name", list(ROWS))
def test_every_row_is_a_configuration_and_its_pair_trains_as_long(name):
    row = ROWS[name]
    config = parse_config(merged(row.settings))
    if row.plain is not None:
        plain = parse_config(merged(ROWS[row.plain].settings))
        assert plain.predict == "off"
        assert plain.model == config.model
        assert (plain.train.steps, plain.optimizer, plain.schedule) == (
            config.train.steps,
            config.optimizer,
            config.schedule,
        )
        assert plain.train.batch_size == config.train.batch_size * config.train.accumulate


def test_a_row_tells_of_losses_phases_and_jumps():
    settings = merged(
        {"model": {"name": "nano", "context": 32}, "train": {"batch_size": 4, "steps": 60, "eval_interval": 20}},
        EAGER,
        {"optimizer": {"lr": 1e-3}, "schedule": {"warmup_steps": 5}},
    )
    found = train(Row("nano", settings), {})
    assert found["last_loss"] < found["first_loss"]
    assert [each["step"] for each in found["evaluations"]][-1] >= 60
    assert found["phases"]["warmup"] == 10
    assert sum(found["jumps"].values()) >= 1
    assert found["divergences"] == 0
    assert found["tokens_per_step"] == 128
    assert found["plan"] == {"no plan": "plans are for a GPU, and this run is on the CPU"}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_in_pages_are_those_that_the_results_make(page):
    text = page.read_text()
    assert tables.rewritten(text) == text, "run python -m benchmarks.validation.tables"
    assert text.count("<!-- table: ") == text.count("<!-- end -->")


def test_every_table_stands_in_a_page():
    named = {name for page in tables.PAGES for name in re.findall(r"<!-- table: ([a-z-]+) -->", page.read_text())}
    assert named == set(tables.TABLES)


@pytest.mark.parametrize("name", charts.PICTURES)
def test_pictures_are_those_that_the_results_make(name):
    assert (charts.DOCS / name).read_text() == charts.PICTURES[name](), "run python -m benchmarks.validation.charts"


def test_the_time_to_a_loss_is_that_from_which_it_is_kept():
    row = {"evaluations": [{"seconds": s, "loss": loss} for s, loss in ((1, 4.0), (2, 2.0), (3, 3.0), (4, 1.0))]}
    assert results.seconds_to(row, 2.0) == 3.5


def test_perplexity_is_compared_after_as_many_steps_and_on_the_same_text():
    row = dict(results.everything()["124m streamed"])
    row["evaluations"] = [each for each in row["evaluations"] if each["step"] <= 500]
    plain = results.perplexity_at(results.everything()["124m plain"], 500)
    assert results.against_plain("124m streamed", row) == pytest.approx(row["perplexity"] / plain - 1)
    row["settings"] = {"train": row["settings"]["train"] | {"eval_batches": 1}}
    assert results.against_plain("124m streamed", row) is None


def test_every_seed_is_compared_with_the_plain_run_of_its_seed():
    rows = results.everything()
    expected = [
        rows[seeded("124m all", seed)]["perplexity"] / rows[seeded("124m plain", seed)]["perplexity"] - 1
        for seed in range(3)
    ]
    assert [row["settings"]["seed"] for row in results.by_seed("124m all")] == [0, 1, 2]
    assert results.differences("124m all") == pytest.approx(expected)
    assert len(results.by_seed("124m auto")) == 1
    assert results.differences("124m plain") == []


@pytest.mark.parametrize(("third", "verdict"), [(0.0, "yes"), (0.03, "**not wholly**")])
def test_of_several_seeds_the_mean_is_judged(monkeypatch, third, verdict):
    measured = results.differences
    found = {"124m conservative": [0.04, 0.0, third]}
    monkeypatch.setattr(promises, "differences", lambda name: found.get(name) or measured(name))
    (line,) = [line for line in promises.promises().splitlines() if "`conservative`" in line]
    assert "to +4.0%)" in line and line.endswith(f"| {verdict} |")


@pytest.mark.parametrize(("now", "verdict"), [(0.049, "yes"), (0.051, "**not wholly**")])
def test_plans_are_judged_as_they_are_counted_now(monkeypatch, now, verdict):
    monkeypatch.setattr(promises, "plans_now", lambda: {"124m auto": now})
    (line,) = [line for line in promises.promises().splitlines() if "plans within" in line]
    assert "off by up to 21.1% (124m auto)" in line and line.endswith(f"| {verdict} |")


def test_what_grows_or_differs_on_the_gpu_breaks_the_promise(monkeypatch):
    gpu = result("faults_gpu")
    memory = [record | {"device_reserved_bytes": 10**9 + record["step"] * 10**6} for record in gpu["quiet"]["memory"]]
    worse = {"equal": False}, {"quiet": gpu["quiet"] | {"memory": memory}}
    for change in worse:
        monkeypatch.setattr(
            promises, "result", lambda name, c=change: result(name) | (c if name == "faults_gpu" else {})
        )
        assert promises.promises().splitlines()[-1].endswith("| **not wholly** |")
