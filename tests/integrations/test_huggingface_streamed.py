"""Hugging Face's folders, streamed: what is read is what was written, and there is one copy of it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integrations.making import tiny, windows

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.integrations.huggingface_streamed import (
    is_streamed,
    require_same_settings,
    save_pretrained,
    stream_pretrained,
)
from hybridtrainer.memory.load import load_weights_
from hybridtrainer.memory.stream import stream

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
FP32 = MemoryConfig(mode="fp32")


def loss_of(model: Any) -> float:
    batch = {name: torch.stack([piece[name] for piece in windows(4)]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        return float(model.eval()(**batch).loss)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_a_folder_is_streamed_trained_and_read_by_hugging_face_again(tmp_path, kind):
    original = tiny(kind, seed=3, dropout=0.0)
    original.save_pretrained(tmp_path / "from", max_shard_size="20KB")
    model = stream_pretrained(tmp_path / "from", FP32, "cpu", lr=1e-2)
    assert is_streamed(model)
    assert loss_of(model) == loss_of(original)
    model.train()
    optimizer: Any = model.optimizer
    for piece in windows(3):
        model(**{name: value[None] for name, value in piece.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_pretrained(model, tmp_path / "to")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    assert loss_of(read) == loss_of(model) != loss_of(original)
    again = stream_pretrained(tmp_path / "to", FP32, "cpu")
    assert loss_of(again) == loss_of(model)


def test_a_written_folder_says_in_which_precision_it_was_written(tmp_path):
    tiny(seed=3).save_pretrained(tmp_path / "from")
    model = stream_pretrained(tmp_path / "from", MemoryConfig(mode="split8"), "cpu")
    save_pretrained(model, tmp_path / "to")
    assert {value.dtype for value in load_file(tmp_path / "to" / "model.safetensors").values()} == {torch.bfloat16}
    told = {folder: json.loads((tmp_path / folder / "config.json").read_text())["dtype"] for folder in ("from", "to")}
    assert told == {"from": "float32", "to": "bfloat16"}
    assert model.config.dtype is torch.float32  # the model itself is left as it is


def test_files_with_the_names_of_a_model_without_head_are_read(tmp_path):
    original = tiny(seed=3)
    original.save_pretrained(tmp_path / "from")
    file = tmp_path / "from" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # masks were once in such files
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, file)
    model = tiny(seed=4)
    load_weights_(model, file)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))


def test_a_folder_without_configuration_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        stream_pretrained(tmp_path, FP32, "cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 1e-3}, "lr=0.003"),
        ({"adam_beta2": 0.95}, "betas"),
        ({"adam_epsilon": 1e-6}, "eps"),
        ({"weight_decay": 0.1}, "weight_decay"),
    ],
)
def test_training_arguments_must_say_what_the_model_was_streamed_with(changes, words):
    args = {"learning_rate": 3e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0}
    optimizer: Any = stream(tiny(), FP32, "cpu", lr=3e-3, weight_decay=0.0).optimizer
    require_same_settings(SimpleNamespace(**args), optimizer)
    with pytest.raises(ModelError, match=words):
        require_same_settings(SimpleNamespace(**(args | changes)), optimizer)
