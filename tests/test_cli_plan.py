"""`hybridtrainer plan`: answers, and errors of every kind of nonsense."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hybridtrainer.cli import app

ENOUGH = ["--vram", "3GB", "--ram", "16GB", "--model", "gpt2-124m", "--seq", "512", "--tokens", "4096"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_a_plan_says_what_it_takes_and_how_to_get_it():
    code, text = run(*ENOUGH, "--hardware", "h200")
    assert code == 0
    for words in ("fits", "[memory]", "activations", "tokens/s", "Next best"):
        assert words in text


def test_as_json():
    code, text = run(*ENOUGH, "--json")
    assert code == 0
    data = json.loads(text)
    assert data["best"]["gpu_bytes"] < 3 << 30
    assert data["best"]["seconds_per_step"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--vram", "0GB"], 2, "vram: must be positive"),
        (["--vram", "much"], 2, "vram: give a size"),
        (["--ram", "-3GB"], 2, "ram"),
        (["--tokens", "-5"], 2, "tokens: must be positive"),
        (["--seq", "0"], 2, "seq"),
        (["--tokens", "1000"], 2, "no whole sequences"),
        (["--model", "gpt-7"], 2, "no model and no file"),
        (["--model", __file__], 2, "no configuration"),
        (["--hardware", "abacus"], 2, "not known"),
        (["--vram", "1.2GB"], 8, "too little"),
        (["--ram", "0.5GB"], 8, "too little"),
    ],
)
def test_nonsense_is_named(arguments, code, words):
    found, text = run(*ENOUGH, *arguments)
    assert (found, words in text) == (code, True), text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU whose memory is taken")
def test_without_a_gpu_its_memory_must_be_given():
    code, text = run("--ram", "16GB")
    assert code == 2
    assert "--vram 16GB" in text
