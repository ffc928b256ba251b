"""Nonsense given to `plan`, on the command line and in Python: a clear error each, and nothing else on the screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hybridtrainer import MemoryConfig, plan, stream
from hybridtrainer.cli import app
from hybridtrainer.errors import ConfigError, ModelError
from hybridtrainer.models.gpt import GPT, GPTConfig, build_gpt

ENOUGH = {"--vram": "3GB", "--ram": "16GB", "--model": "nano", "--seq": "128", "--tokens": "256"}


def answer(**given: str) -> tuple[int, str]:
    options = ENOUGH | {f"--{name}": value for name, value in given.items()}
    result = CliRunner().invoke(app, ["plan", *(word for option in options.items() for word in option)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"vram": "0GB"}, 2, "vram: must be a positive size"),
        ({"vram": "much"}, 2, "vram: must be a size"),
        ({"vram": "1e400GB"}, 2, "vram: must be a size"),
        ({"vram": "0.9GB"}, 8, "too little"),
        ({"ram": "-3GB"}, 2, "ram: must be a size"),
        ({"ram": "0.5GB", "vram": "1.05GB"}, 8, "too little"),
        ({"tokens": "-5"}, 2, "tokens: must be positive"),
        ({"tokens": "0"}, 2, "tokens: must be positive"),
        ({"tokens": "1000"}, 2, "no whole sequences"),
        ({"tokens": "9" * 30}, 2, "more than the"),
        ({"tokens": "many"}, 2, "Invalid value for '--tokens'"),
        ({"seq": "0"}, 2, "seq: must be positive"),
        ({"accumulate": "0"}, 2, "accumulate: must be positive"),
        ({"accumulate": "3"}, 2, "2 sequences are no 3 micro-batches"),
        ({"model": "gpt-7"}, 2, "no model and no file named 'gpt-7'"),
        ({"model": ""}, 2, "no model and no file"),
        ({"hardware": "abacus"}, 2, "speeds of 'abacus' are not known"),
        ({"hardware": "."}, 2, "not known"),
        ({"hardware": __file__}, 2, "is no calibration: it holds no JSON"),
        ({"write": "/nowhere/at/all.toml"}, 5, "cannot be written"),
        ({"write": "x" * 300}, 5, "cannot be written"),
        ({"model": "x" * 5000}, 2, "no model and no file"),
        ({"model": "/dev/zero"}, 2, "File too large"),
    ],
)
def test_options_that_make_no_sense_are_named(given, code, words):
    found, text = answer(**given)
    assert (found, words in text) == (code, True), text


ENCODER = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no JSON"),
        (bytes(range(256)) * 8, "holds no JSON"),
        (b"[" * 100_000, "holds no JSON"),
        (b" " * (17 << 20), "File too large"),
        (b"[1, 2]", "has no `model_type`"),
        (b'"llama"', "has no `model_type`"),
        (b"{}", "has no `model_type`"),
        ({"model_type": "no-such"}, "causal decoder of 'no-such'"),
        ({"model_type": 5}, "causal decoder of '5'"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "No repeated blocks"),
        ({"model_type": "llama", "hidden_size": -4}, "causal decoder of 'llama'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "causal decoder of 'llama'"),
        (ENCODER, "BertLMHeadModel"),
        ({"model_type": "vit"}, "causal decoder of 'vit'"),
        ({"model_type": "t5"}, "an encoder with a decoder"),
        ({"model_type": "whisper"}, "an encoder with a decoder"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_files_that_describe_no_decoder_are_named_in_a_few_words(tmp_path, content, words):
    if isinstance(content, dict):
        pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    for named in (path, tmp_path):
        code, text = answer(model=str(named))
        assert (code, words in text) == (2, True), text
        assert len(text) < 600, "whoever made the mistake must find it"


@pytest.mark.parametrize("name", ["none.json", "empty-folder"])
def test_files_that_are_not_there_are_named(tmp_path, name):
    (tmp_path / "empty-folder").mkdir()
    code, text = answer(model=str(tmp_path / name))
    assert code == 2 and name in text and "llama-7b" in text


class Alone(nn.Module):
    """Has layers, and none of them repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Alone(), "No repeated blocks were found in Alone"),
        (nn.Linear(4, 4), "No repeated blocks were found in Linear"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "language_loss does not know how Sequential"),
        (build_gpt("nano", blocks=1, device="meta"), "No repeated blocks"),
        (42, "The model is a int"),
        (Path("llama-7b"), "not an nn.Module"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_modules_that_are_no_decoders_are_named(model, words):
    with pytest.raises(ModelError, match=words) as refused:
        plan(model, "4GB", "4GB", tokens=256, context=128)
    assert refused.value.remedy


@pytest.mark.parametrize("size", [0, -1, None, float("nan"), 1.5, "", "8"])
def test_budgets_that_are_no_sizes_are_named(size: Any):
    with pytest.raises(ConfigError, match="vram"):
        plan("nano", size, "4GB")


def tiny(**changes: Any) -> GPT:
    return GPT(GPTConfig("gpt2", 3, 24, 3, vocabulary=97, context=16, **changes))


def test_models_in_which_little_or_nothing_is_trained():
    frozen = tiny(tied=False).requires_grad_(False)
    with pytest.raises(ModelError, match="No parameter of the model is trained"):
        plan(frozen, vram="4GB", ram="8GB", tokens=64, context=16)
    frozen.head.requires_grad_(True)
    assert plan(frozen, vram="4GB", ram="8GB", tokens=64, context=16).best.memory.mode == "resident"


def test_complex_weights_are_named_and_frozen_ones_pass():
    model = tiny()
    for block in model.blocks:
        block.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    with pytest.raises(ModelError, match="`phase` is complex"):
        plan(model, vram="4GB", ram="8GB", tokens=64, context=16)
    with pytest.raises(ModelError, match="`phase` is complex"):
        stream(model, MemoryConfig(mode="split8"), "cpu")
    for block in model.blocks:
        block.get_parameter("phase").requires_grad_(False)
    assert plan(model, vram="4GB", ram="8GB", tokens=64, context=16).best.memory.mode == "resident"


@pytest.mark.parametrize("name", ["shared", "double"])
def test_odd_modules_are_named(name):
    model = tiny().double() if name == "double" else tiny()
    if name == "shared":
        model.blocks[1] = model.blocks[0]
    with pytest.raises(ModelError, match="share a parameter" if name == "shared" else "float64"):
        plan(model, vram="4GB", ram="8GB", tokens=64, context=16)


def test_sequences_that_the_model_does_not_take():
    with pytest.raises(ModelError, match="64 tokens"):
        plan(tiny(), vram="4GB", ram="8GB", tokens=64, context=64)


def test_weights_of_16_bits_are_planned_as_they_are():
    found = plan(tiny().bfloat16(), vram="4GB", ram="8GB", tokens=64, context=16)
    assert found.best.memory.mode == "resident"
    assert (
        found.best.estimate.gpu["weights"]
        < plan(tiny(), "4GB", "8GB", tokens=64, context=16).best.estimate.gpu["weights"]
    )
