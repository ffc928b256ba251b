"""Every setting is explained once, for files and for the reference page."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from hybridtrainer.config import PRESETS, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from hybridtrainer.config_reference import sections, settings_of, settings_page


def kinds(section: BaseModel) -> dict[str, str]:
    return {each.name: each.kind for each in settings_of(section)}


def test_every_section_comes_once_with_its_path():
    found = [".".join(path) for path, _ in sections(RunConfig())]
    assert found == ["", "depth", "memory", "model", "data", "optimizer", "schedule", "train", "run"]


def test_every_setting_is_explained():
    found = [(path, each) for path, section in sections(RunConfig()) for each in settings_of(section)]
    assert len(found) > 60
    assert [each.name for _, each in found if not each.meaning] == []


@pytest.mark.parametrize(
    ("section", "name", "kind"),
    [
        (RunConfig(), "warmup_steps", "whole number, 0 or more"),
        (RunConfig(), "seed", "whole number, 0 or more"),
        (RunConfig(), "predict", '`"off"`, `"auto"`, or list of `"jumps"`, `"samples"`, `"depth"`'),
        (RunConfig(), "hooks", "list of text"),
        (DataConfig(), "path", "text"),
        (DataConfig(), "probe_share", "number, above 0, below 0.5"),
        (OptimizerConfig(), "betas", "list of two: number, 0 or more, below 1"),
        (TrainConfig(), "clip_norm", "number, 0 or more"),
        (RunConfig().memory, "optimizer_bits", "`32`, `8`, `4`"),
        (RunConfig().memory, "profile", "`true` or `false`"),
    ],
)
def test_the_values_of_a_setting_are_told_in_words(section, name, kind):
    assert kinds(section)[name] == kind


def test_the_page_has_every_setting_with_its_default_under_its_section():
    tables = re.split(r"^## ", settings_page(), flags=re.M)[1:]
    for (path, section), table in zip(sections(RunConfig()), tables, strict=False):
        rows = re.findall(r"^\| `(\w+)` \| .* \| (.+?) \| .+ \|$", table, flags=re.M)
        assert table.startswith(".".join(path) or "Phases")
        assert [name for name, _ in rows] == [each.name for each in settings_of(section)]
    assert "| `vram` | text | left out | GPU memory" in settings_page()
    assert "| `betas` | list of two: number, 0 or more, below 1 | `[0.9, 0.95]` |" in settings_page()


def test_the_page_has_the_values_of_every_preset():
    table = settings_page().split("## Presets")[1]
    assert "| key | default | conservative | aggressive |" in table
    plain = RunConfig()
    for key in PRESETS["aggressive"]:
        values = [preset.get(key, getattr(plain, key)) for preset in PRESETS.values()]
        assert f"| `{key}` | {' | '.join(f'`{value}`' for value in values)} |" in table
