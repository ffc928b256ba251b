"""Every recipe validates, and is what the planner makes today."""

from __future__ import annotations

import re
import shlex

import pytest
from benchmarks.recipes import CARDS, CONTEXTS, FOLDER, overview, recipes
from typer.testing import CliRunner

from hybridtrainer.cli import app
from hybridtrainer.planning.recipe import recipe

FILES = sorted(FOLDER.glob("*.toml"))
README = (FOLDER / "README.md").read_text()
QUICK = ["gpt2-124m", "llama-7b"]


@pytest.mark.parametrize("models", [QUICK, pytest.param(list(CONTEXTS), marks=pytest.mark.slow)], ids=["two", "all"])
def test_recipes_are_what_the_planner_makes(models):
    made = list(recipes(models))
    assert len(made) == len(models) * len(CARDS)
    for each in made:
        if each.found is not None:
            assert (FOLDER / each.file).read_text() == recipe(each.model, each.found), "python -m benchmarks.recipes"
        else:
            assert not (FOLDER / each.file).exists()
    rows = [line for line in overview(made).splitlines() if any(model in line for model in models)]
    assert set(rows) <= set(README.splitlines())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_recipe_validates(file):
    result = CliRunner().invoke(app, ["validate", str(file)])
    assert result.exit_code == 0, result.output


def test_every_model_and_card_has_a_recipe_or_a_reason():
    for model in CONTEXTS:
        for card in CARDS:
            has_file = (FOLDER / f"{model}-{card}gb.toml") in FILES
            has_reason = bool(re.search(rf"^\| {re.escape(model)} \| {card} GB \| .* needs .* \|$", README, flags=re.M))
            assert has_file != has_reason, f"{model} on {card} GB"


def test_a_model_that_needs_a_machine_with_more_memory_has_a_recipe_for_one():
    for model, card, ram in (("llama-7b", 4, 28), ("llama-50b", 8, 124), ("llama-50b", 16, 124)):
        assert ram > CARDS[card]
        assert f"--vram {card}GB --ram {ram}GB " in (FOLDER / f"{model}-{card}gb.toml").read_text()


@pytest.mark.slow
def test_the_command_in_a_recipe_makes_it(tmp_path):
    text = (FOLDER / "gpt2-124m-4gb.toml").read_text()
    (command,) = re.findall(r"^# Made by: hybridtrainer (.*)$", text, flags=re.M)
    words = [str(tmp_path / "made.toml") if word == "FILE" else word for word in shlex.split(command)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (tmp_path / "made.toml").read_text() == text
