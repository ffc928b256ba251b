"""What a configuration accepts, and what its presets are."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from hybridtrainer.config import (
    PRESETS,
    DataConfig,
    FolderConfig,
    HybridTrainerConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ConfigError
from hybridtrainer.models.cnn import CNN_WIDTHS
from hybridtrainer.models.gpt import GPT_CONFIGS
from hybridtrainer.predict.baselines import VELOCITIES


def test_defaults_are_the_documented_ones():
    config = HybridTrainerConfig()
    assert config.warmup_steps == 100
    assert config.full_steps == 20
    assert config.max_predict_steps == 30
    assert config.correction_interval == 15
    assert config.confidence_threshold == 0.85
    assert config.divergence_sigma == 3
    assert config.save_interval == 50
    assert config.keep_last == 3
    assert config.predict == "auto"
    assert config.memory.precision == "fp32"


@pytest.mark.parametrize(("preset", "values"), [("conservative", (0.60, 50, 15)), ("aggressive", (0.55, 75, 10))])
def test_presets_change_three_settings_and_no_other(preset, values):
    made = getattr(HybridTrainerConfig, preset)()
    changed = dict(zip(("confidence_threshold", "max_predict_steps", "correction_interval"), values, strict=True))
    assert made == HybridTrainerConfig(**changed)
    assert PRESETS[preset] == changed


def test_overrides_win_over_a_preset():
    assert HybridTrainerConfig.aggressive(correction_interval=3, seed=7) == HybridTrainerConfig(
        confidence_threshold=0.55, max_predict_steps=75, correction_interval=3, seed=7
    )
    assert isinstance(RunConfig.conservative(), RunConfig)


@pytest.mark.parametrize(
    "section",
    [
        HybridTrainerConfig, RunConfig, MemoryConfig, ModelConfig, DataConfig, OptimizerConfig, ScheduleConfig,
        TrainConfig, FolderConfig,
    ],
)  # fmt: skip
def test_every_section_is_frozen_and_refuses_unknown_keys(section):
    made = section()
    name = next(iter(section.model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, name, getattr(made, name))
    with pytest.raises(ConfigError, match="nonsense: is not a known key"):
        section(nonsense=1)


def number_fields() -> list[tuple[type, str]]:
    sections: list[type[BaseModel]] = [
        HybridTrainerConfig, ModelConfig, DataConfig, OptimizerConfig, ScheduleConfig, TrainConfig
    ]  # fmt: skip
    return [
        (section, name)
        for section in sections
        for name, field in section.model_fields.items()
        if {int, float} & {field.annotation, *get_args(field.annotation)}
    ]


@pytest.mark.parametrize(("section", "name"), number_fields())
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", True])
def test_numbers_must_be_finite_and_are_not_made_of_other_things(section, name, value):
    with pytest.raises(ConfigError):
        section(**{name: value})


def test_every_number_setting_was_tried():
    assert len(number_fields()) > 25  # or the test above would hold for want of cases


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        (HybridTrainerConfig, {"warmup_steps": -1}),
        (HybridTrainerConfig, {"full_steps": 0}),
        (HybridTrainerConfig, {"confidence_threshold": 1.01}),
        (HybridTrainerConfig, {"confidence_threshold": -0.01}),
        (HybridTrainerConfig, {"divergence_sigma": 0.0}),
        (HybridTrainerConfig, {"history_windows": 1}),
        (HybridTrainerConfig, {"history_windows": 17}),
        (HybridTrainerConfig, {"waste_limit": 1.5}),
        (HybridTrainerConfig, {"seed": 2**63}),
        (HybridTrainerConfig, {"seed": -1}),
        (HybridTrainerConfig, {"seed": 1.0}),
        (HybridTrainerConfig, {"predict": "on"}),
        (HybridTrainerConfig, {"predict": ["leaps"]}),
        (HybridTrainerConfig, {"forecaster": "oracle"}),
        (HybridTrainerConfig, {"memory": {"precision": "fp8"}}),
        (HybridTrainerConfig, {"hooks": [1]}),
        (ModelConfig, {"dropout": 1.0}),
        (ModelConfig, {"context": 1}),
        (DataConfig, {"validation_share": 0.5}),
        (DataConfig, {"probe_share": 0.0}),
        (OptimizerConfig, {"lr": 0.0}),
        (OptimizerConfig, {"momentum": 1.0}),
        (OptimizerConfig, {"betas": (0.9,)}),
        (OptimizerConfig, {"betas": (0.9, math.nan)}),
        (OptimizerConfig, {"betas": ("0.9", "0.95")}),
        (OptimizerConfig, {"betas": (0.9, 1.0)}),
        (OptimizerConfig, {"betas": (-0.1, 0.9)}),
        (ScheduleConfig, {"final_ratio": 1.1}),
        (TrainConfig, {"steps": 0}),
        (TrainConfig, {"clip_norm": -1.0}),
        (TrainConfig, {"device": "tpu"}),
    ],
)
def test_values_out_of_range_are_refused(section, settings):
    with pytest.raises(ConfigError):
        section(**settings)


def test_whole_numbers_may_stand_for_fractions_and_lists_for_pairs():
    assert OptimizerConfig.model_validate({"lr": 1, "betas": [0, 0.5]}) == OptimizerConfig(lr=1.0, betas=(0.0, 0.5))


def test_model_names_are_those_that_can_be_built():
    assert set(get_args(ModelConfig.model_fields["name"].annotation)) == {*GPT_CONFIGS, *CNN_WIDTHS}


def test_forecaster_names_are_those_that_exist():
    names = set(get_args(HybridTrainerConfig.model_fields["forecaster"].annotation))
    assert names == {"auto", "momentum", "learned", *VELOCITIES}


@pytest.mark.parametrize(
    ("predict", "allowed"),
    [
        ("off", False),
        ("auto", True),
        (["jumps"], True),
        ([], False),
        (["samples"], False),
        (["samples", "jumps"], True),
    ],
)
def test_predict_says_whether_jumps_are_allowed(predict, allowed):
    assert HybridTrainerConfig(predict=predict).jumps_allowed() is allowed


def test_configurations_need_no_torch():
    code = "import sys, hybridtrainer.config, hybridtrainer.config_io; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
