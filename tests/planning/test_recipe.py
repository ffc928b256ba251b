"""A plan as a configuration: it validates, holds the plan's settings, and is not written over another file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridtrainer.config_io import load_config
from hybridtrainer.errors import ConfigError
from hybridtrainer.planning.cards import BUILT_IN
from hybridtrainer.planning.planner import Plan, plan
from hybridtrainer.planning.recipe import recipe


@pytest.fixture(scope="module")
def nano() -> Plan:
    return plan("nano", "2GB", "4GB", tokens=1024, context=128, accumulate=2, hardware=BUILT_IN["rtx-4060"])


def test_a_recipe_is_a_configuration_of_what_was_planned(nano, tmp_path):
    (tmp_path / "nano.toml").write_text(recipe("nano", nano))
    config = load_config(tmp_path / "nano.toml")
    assert config.memory == nano.best.memory
    assert (config.model.name, config.model.context) == ("nano", 128)
    assert (config.train.batch_size, config.train.accumulate) == (4, 2)


def test_a_streamed_recipe_takes_the_batch_whole(nano, tmp_path):
    streamed = replace(nano, best=next(each for each in nano.others if each.memory.mode == "split8"))
    (tmp_path / "nano.toml").write_text(recipe("nano", streamed))
    config = load_config(tmp_path / "nano.toml")
    assert config.memory.mode == "split8"
    assert (config.train.batch_size, config.train.accumulate) == (8, 1)


def test_its_comments_say_what_was_assumed_and_how_to_make_it(nano):
    text = recipe("nano", nano)
    for words in ("a card of 2 GB", "4 GB of host memory", "--tokens 1024 --accumulate 2", "not measured"):
        assert words in text
    assert '--hardware "NVIDIA GeForce RTX 4060" --write FILE' in text
    assert "--hardware none --write FILE" in recipe("nano", replace(nano, hardware=None))


def test_a_readout_that_was_asked_for_is_in_the_recipe_and_in_its_command(nano, tmp_path):
    assert "readout" not in recipe("nano", nano)
    text = recipe("nano", replace(nano, readout="averaged"))
    assert " --readout averaged --write FILE" in text
    (tmp_path / "nano.toml").write_text(text)
    assert load_config(tmp_path / "nano.toml").readout == "averaged"


def test_a_model_that_a_configuration_cannot_name_is_refused(nano):
    with pytest.raises(ConfigError, match="no decoder that a configuration can name"):
        recipe("path/to/config.json", nano)
