"""Mistakes in settings made in Python: the project's own error, with all of them under their full names."""

from __future__ import annotations

import copy
import pickle

import pytest
from pydantic import ValidationError

from hybridtrainer import HybridTrainerConfig, MemoryConfig
from hybridtrainer.config import RunConfig
from hybridtrainer.config_problems import closest, problems_of, shorten
from hybridtrainer.errors import ConfigError


def keys(error: ConfigError) -> set[str]:
    return {problem.key for problem in error.problems}


def test_every_mistake_in_a_section_is_told_at_once_with_what_might_be_meant():
    with pytest.raises(ConfigError, match=r"MemoryConfig has 3 errors(.|\n)*Did you mean profile\?") as refused:
        MemoryConfig(vram="much", split=0, profle=True)  # type: ignore[call-arg]
    assert keys(refused.value) == {"vram", "split", "profle"}
    assert refused.value.exit_code == 2 and refused.value.remedy


def test_mistakes_in_a_section_inside_another_are_told_by_their_full_name_beside_the_others():
    settings = {"memory": {"vram": 3, "mode": "sr9"}, "train": {"steps": 0}, "seed": -1, "betas": 1}
    with pytest.raises(ConfigError) as refused:
        RunConfig(**settings)  # type: ignore[arg-type]
    assert keys(refused.value) == {"memory.vram", "memory.mode", "train.steps", "seed", "betas"}


@pytest.mark.parametrize("preset", [HybridTrainerConfig.conservative, HybridTrainerConfig.aggressive])
def test_presets_tell_mistakes_alike(preset):
    with pytest.raises(ConfigError, match="full_steps"):
        preset(full_steps=0)


def test_a_section_is_checked_copied_and_sent_as_before():
    config = HybridTrainerConfig(memory=MemoryConfig(split=2), seed=3)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert HybridTrainerConfig.model_validate(config.model_dump()) == config
    assert config.memory.model_fields_set == {"split"}
    with pytest.raises(ValidationError):
        HybridTrainerConfig.model_validate({"memory": {"split": 0}})


def test_of_the_branches_of_a_union_the_most_precise_is_told():
    with pytest.raises(ValidationError) as refused:
        HybridTrainerConfig.model_validate({"predict": ["jump"]})
    (problem,) = problems_of(refused.value.errors(), HybridTrainerConfig)
    assert (problem.key, problem.suggestion) == ("predict", "Did you mean jumps?")


def test_words_far_from_all_others_mean_nothing_and_long_values_are_cut():
    assert closest("xyzzy", ["steps", "seed"]) is None
    assert len(shorten(dict.fromkeys(range(100), "x" * 100))) < 80
