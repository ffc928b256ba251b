"""The validation's rows are configurations that exist, and a row says what it should."""

from __future__ import annotations

import pytest
from benchmarks.validation.rows import EAGER, ROWS, Row, merged
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
