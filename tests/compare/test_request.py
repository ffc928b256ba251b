"""What was typed becomes a comparison, or every mistake is said before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridtrainer.compare.options import Grid
from hybridtrainer.compare.request import Request, read_request
from hybridtrainer.errors import ConfigError, RunFolderError


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(*configs: str, **options: Any) -> Request:
    typed: dict[str, Any] = {"overrides": [], "seeds": 5, "target": None, "metric": None, "name": None}
    typed |= {"tolerance": 0.002, "whole_runs": False}
    return read_request([Path(config) for config in configs], **(typed | options))


def test_a_task_by_name_brings_its_own_target():
    request = read("fashion-mnist", overrides=["data.path=somewhere"])
    assert request.options.target == 0.905 and request.folder == Path("runs/compare-fashion-mnist")
    assert read("fashion-mnist", overrides=["data.path=x"], target="median").options.target is None
    assert read("fashion-mnist", overrides=["data.path=x"], target="0.91").options.target == 0.91
    assert read("digits").options.target is None
    assert read("fashion-mnist", overrides=["data.path=x"], metric="loss").options.target is None
    assert read("digits", overrides=["seed=7"]).options.first_seed == 7


def test_without_a_configuration_there_is_nothing_to_compare():
    with pytest.raises(ConfigError, match=r"CONFIG: is missing\. Name a file, or a task: digits, stdlib") as refused:
        read(name="mine")
    assert "hybridtrainer compare --help" in refused.value.remedy


def test_the_target_of_a_task_is_not_called_given():
    data = ["data.path=x"]
    assert read("fashion-mnist", overrides=data).options.target_origin == "that of the task fashion-mnist"
    assert read("fashion-mnist", overrides=data, target="0.9").options.target_origin == "given"


def test_the_plan_says_arms_seeds_and_steps():
    request = read("digits", overrides=["train.steps=100"])
    plan = "plain, plain-averaged and hybrid, 5 seeds each, 1,500 steps in all"
    assert request.plan() == f"{plan}; what is there already is not trained again"
    assert "and hybrid, 1 seed, 300 steps in all" in read("digits", overrides=["train.steps=100"], seeds=1).plan()
    tuned = request.tuned("1,2", "constant", "1,0.5").plan()
    assert "4 candidates are tried for every arm, 900 steps or more" in tuned


def test_arms_whose_memory_is_yet_to_be_planned_are_refused():
    Path("one.toml").write_text("")
    Path("two.toml").write_text('[memory]\nvram = "8GB"\n')
    with pytest.raises(ConfigError, match=r'memory\.mode: is "auto" in two\.toml'):
        read("one.toml", "two.toml")


def test_several_files_are_arms_named_after_them():
    for name in ("one", "two"):
        Path(f"{name}.toml").write_text("[train]\nsteps = 100\n")
    request = read("one.toml", "two.toml", overrides=["train.steps=50"])
    assert [(arm.name, arm.config.train.steps) for arm in request.arms] == [("one", 50), ("two", 50)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "high"}, "target: is 'high'"),
        ({"target": "nan"}, "target"),
        ({"seeds": 0}, "seeds"),
        ({"metric": "speed"}, "metric"),
        (
            {
                "metric": "accuracy",
                "overrides": ["data.source=stdlib", "data.validation_share=0.05", "model.name=nano"],
            },
            "by loss",
        ),
        ({"overrides": ["predict=off"]}, "hybrid would be plain"),
        ({"overrides": ["optimizer.lr=-1"]}, "optimizer.lr"),
    ],
)
def test_mistakes_are_said_and_nothing_is_written(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read("digits", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../other", ""])
def test_a_name_that_cannot_be_one_is_refused(name):
    with pytest.raises(RunFolderError):
        read("digits", name=name)


def test_a_misspelt_task_is_named():
    with pytest.raises(ConfigError, match="Did you mean fashion-mnist"):
        read("fasion-mnist")
    with pytest.raises(ConfigError, match="Tasks by name: digits, stdlib-gpt"):
        read("zzz")


def test_a_grid_is_read_from_lists_with_commas():
    grid = read("digits").tuned("0.5, 1", "constant,linear", "1").options.grid
    assert grid is not None
    assert (grid.rates, grid.schedules, grid.lengths) == ((0.5, 1.0), ("constant", "linear"), (1.0,))
    assert read("digits").tuned(lengths="1,0.5").options.grid == Grid(lengths=(1.0, 0.5))
    with pytest.raises(ConfigError, match="tune-lr: is 'fast'"):
        read("digits").tuned("fast", "constant", "1")
