"""Tasks by name are valid, are what they say, and have the targets that others report."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hybridtrainer.config_io import commented_toml, load_config
from hybridtrainer.errors import ConfigError
from hybridtrainer.models.cnn import CNN
from hybridtrainer.named_tasks import NAMED_TASKS
from hybridtrainer.tasks import build_task

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
DATA = os.environ.get("HYBRIDTRAINER_TEST_DATA", "")
NEEDS_PATH = ("mnist", "fashion-mnist", "fashion-mnist-small", "text")


@pytest.mark.parametrize("name", NAMED_TASKS)
def test_every_task_is_a_valid_configuration(name, tmp_path, monkeypatch):
    overrides = ["data.path=somewhere"] if name in NEEDS_PATH else []
    config = load_config(name, overrides)
    assert config.train.steps // config.train.eval_interval >= 50
    monkeypatch.chdir(tmp_path)
    Path("task.toml").write_text(commented_toml(task=name))
    written = load_config("task.toml", overrides)
    assert written.model_dump() == config.model_dump()


@pytest.mark.parametrize("name", NEEDS_PATH)
def test_what_needs_data_says_so(name):
    with pytest.raises(ConfigError, match=r"data\.path: is needed"):
        load_config(name)


def test_a_file_of_the_same_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("digits").write_text("seed = 9\n")
    assert load_config("digits").seed == 9


def test_an_unknown_task_is_refused_by_init():
    with pytest.raises(ConfigError, match="Did you mean fashion-mnist"):
        commented_toml(task="fashion_mnist")


def test_the_yardsticks_are_those_of_the_literature():
    assert {name: task.target for name, task in NAMED_TASKS.items() if task.target} == {
        "mnist": 0.99,
        "fashion-mnist": 0.905,
        "fashion-mnist-small": 0.895,
    }


@pytest.mark.parametrize(
    ("result", "names"),
    [
        ("tune_fashion", ["fashion-mnist", "fashion-mnist-small"]),
        ("tune_mnist", ["mnist"]),
        ("tune_digits", ["digits"]),
        ("tune_stdlib_gpt", ["stdlib-gpt"]),
    ],
)
def test_the_settings_are_the_best_ones_found(result, names):
    """Of all plain arms that were tuned, the one that reached the yardstick with the fewest steps."""
    found = json.loads((RESULTS / f"{result}.json").read_text())["tasks"]
    for name in names:
        goal = "yardstick" if NAMED_TASKS[name].target else "best plain"
        reached = {
            row["candidate"]: row["steps_to"][goal]
            for row in sorted(found[name]["candidates"], key=lambda row: -(row["steps_to"][goal] or 0))
            if row["steps_to"][goal] is not None
        }
        best = min(reached, key=reached.__getitem__)
        assert best == f"rate1-{NAMED_TASKS[name].settings['schedule']['name']}-length1"


@pytest.mark.skipif(not DATA, reason="HYBRIDTRAINER_TEST_DATA is not set")
@pytest.mark.parametrize(
    ("name", "folder", "widths"),
    [("fashion-mnist", "fashion-mnist", (32, 64, 64)), ("fashion-mnist-small", "fashion-mnist", (16, 32, 32))],
)
def test_the_nets_are_those_of_the_yardsticks_and_every_test_image_is_evaluated(name, folder, widths):
    task = build_task(load_config(name, [f"data.path={DATA}/{folder}"]))
    model = task.trainer.model
    assert isinstance(model, CNN)
    assert tuple(len(p) for n, p in model.named_parameters() if n.startswith("features") and p.dim() == 4) == widths
    assert sum(len(labels) for _, labels in task.validation) == 10_000
    assert task.loader.batch_size == 128 and len(task.loader.dataset) == 58_800
