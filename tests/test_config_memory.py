"""Settings of memory: sizes as people write them, and what a budget alone means."""

from __future__ import annotations

import pytest

from hybridtrainer.config_io import parse_config
from hybridtrainer.config_memory import MemoryConfig, size_in_bytes
from hybridtrainer.errors import ConfigError


@pytest.mark.parametrize(("text", "nbytes"), [("8GB", 8 << 30), ("1.5 GiB", 3 << 29), ("900mb", 900 << 20)])
def test_sizes_of_memory_are_read_in_powers_of_two(text, nbytes):
    assert size_in_bytes(MemoryConfig(vram=text).vram) == nbytes


def test_a_budget_alone_means_that_the_rest_is_planned():
    assert MemoryConfig(vram="8GB").mode == MemoryConfig(vram="8GB", split=2).mode == "auto"
    assert MemoryConfig(vram="8GB", mode="split8").mode == "split8"
    assert MemoryConfig().mode == MemoryConfig(ram="8GB").mode == MemoryConfig(vram=None).mode == "resident"


def test_an_interval_can_be_left_to_the_plan_and_to_nothing_else():
    for given in ({}, {"mode": "auto"}, {"vram": "8GB"}):
        memory = MemoryConfig.model_validate({"checkpoint_every": "auto", **given})
        assert memory.mode == "auto" and "checkpoint_every" not in memory.model_fields_set
    for mode in ("resident", "split8"):
        with pytest.raises(ConfigError, match=r'only with memory\.mode = "auto" is it planned'):
            parse_config({"memory": {"checkpoint_every": "auto", "mode": mode}})


@pytest.mark.parametrize(
    "text", ["8", "GB", "-8GB", "8TB", "8 GB of it", "", "inf", "1e999GB", "-0GB", "\uff18GB", "9" * 400 + "GB"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="16GB"):
        MemoryConfig(vram=text)
