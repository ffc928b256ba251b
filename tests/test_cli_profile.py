"""`hybridtrainer profile`: tables, files, and errors of every kind of nonsense before anything is trained."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from hybridtrainer.cli import app
from hybridtrainer.models.gpt import GPT
from hybridtrainer.observe.snapshots import read_snapshots


@pytest.fixture
def small(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("what a run takes, step by step. " * 2000)
    settings = {
        "data.source": "text", "data.path": str(path), "model.context": 32, "train.batch_size": 2,
        "train.device": "cpu",
    }  # fmt: skip
    return ["-q", *(part for key, value in settings.items() for part in ("--set", f"{key}={value}"))]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["profile", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_table_by_phase_and_component_and_every_file_asked_for(small, tmp_path):
    csv, jsonl, html = (str(tmp_path / f"p.{ending}") for ending in ("csv", "jsonl", "html"))
    phases = ["--set", "warmup_steps=3", "--set", "full_steps=2"]
    code, text = run(*small, *phases, "--steps", "6", "--csv", csv, "--jsonl", jsonl, "--html", html)
    assert code == 0, text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith(("warmup", "full"))}
    assert (rows["warmup"][1], rows["full"][1]) == ("4", "2")  # of the first, a model that begins short grows at once
    for words in ("optimizer states", "activations and other", "No plan beside it", f"Wrote {html}"):
        assert words in text
    assert len(read_snapshots(tmp_path / "p.csv")) == 6
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 6
    assert "Memory profile" in (tmp_path / "p.html").read_text()
    code, text = run(*small, "--steps", "2", "--csv", csv)
    assert code == 5 and "--force" in text
    assert len(read_snapshots(tmp_path / "p.csv")) == 6


def test_as_json_it_is_one_object_and_nothing_is_left_in_the_folder(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = run(*small, "--steps", "3", "--json")
    assert code == 0
    found = json.loads(text)
    assert (found["steps"], found["plan"], found["written"]) == (3, None, [])
    assert found["phases"]["warmup"]["components"]["weights"] > 0
    assert list(tmp_path.iterdir()) == []


def test_where_only_warmup_was_seen_it_says_how_to_see_more(small):
    code, text = run(*small, "--steps", "1")
    assert code == 0 and "--set warmup_steps=4" in text


def out_of_memory_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """GPU memory runs out for ever after so many forward passes of the model."""
    original, count = GPT.hidden, 0

    def hungry(model: GPT, tokens: Tensor) -> Tensor:
        nonlocal count
        count += not tokens.is_meta
        if count > calls and not tokens.is_meta:
            raise torch.OutOfMemoryError("injected")
        return original(model, tokens)

    monkeypatch.setattr(GPT, "hidden", hungry)


def test_what_was_seen_before_memory_ran_out_is_shown_and_written(small, tmp_path, monkeypatch):
    csv, html = str(tmp_path / "p.csv"), str(tmp_path / "p.html")
    plain = [*small, "--set", "predict=off", "--steps", "6"]
    with monkeypatch.context() as patch:
        out_of_memory_after(patch, 3)
        code, text = run(*plain, "--csv", csv, "--html", html)
    assert code == 8 and text.index("3 steps in ") < text.index("Error: Out of GPU memory in the forward pass")
    assert f"Wrote {csv}." in text and len(read_snapshots(tmp_path / "p.csv")) == 3
    assert "Memory profile" in (tmp_path / "p.html").read_text()
    with monkeypatch.context() as patch:
        out_of_memory_after(patch, 2)
        code, text = run(*plain, "--json")
    found = json.loads(text)
    assert (code, found["steps"], found["error"]["type"]) == (8, 2, "GpuMemoryError")
    with monkeypatch.context() as patch:
        out_of_memory_after(patch, 0)
        code, text = run(*plain, "--csv", str(tmp_path / "none.csv"))
    assert code == 8 and "steps in" not in text and not (tmp_path / "none.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--steps", "0"], 2, "greater than or equal to 1"),
        (["--spike", "much"], 2, "spike: must be a size"),
        (["--spike", "0MB"], 2, "spike: must be positive"),
        (["--csv", "p.txt"], 5, "does not end in .csv"),
        (["--csv", "."], 5, "does not end in .csv"),
        (["--jsonl", "nowhere/p.jsonl"], 5, "is not there"),
        (["--html", "p.csv"], 5, "does not end in .html"),
        (["no.toml"], 2, "cannot be read"),
        (["--set", "memory.profile=2"], 2, "memory.profile"),
        (["--set", "memory.cleanup_every=3"], 2, "there is no GPU"),
        (["--set", "memory.profil=true"], 2, "memory.profil"),
    ],
)
def test_nonsense_is_named(small, arguments, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, text = run(*small, *arguments)
    assert (found, words in text) == (code, True), text
    assert list(tmp_path.iterdir()) == []
