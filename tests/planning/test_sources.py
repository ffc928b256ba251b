"""Models for plans: by name, from a file, or refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrainer import MemoryConfig, plan
from hybridtrainer.errors import ModelError
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.describe import as_data, as_text
from hybridtrainer.planning.pieces import rehearse_pieces
from hybridtrainer.planning.rehearsal import Ledger
from hybridtrainer.planning.resident import rehearse_resident
from hybridtrainer.planning.sources import load_without_memory, remarks_on


def test_names_give_models_without_memory():
    model = load_without_memory("llama-50b", 4096)
    assert sum(parameter.numel() for parameter in model.parameters()) > 50e9
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_configuration_of_hugging_face_gives_a_decoder(tmp_path, as_folder):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    model = load_without_memory(str(tmp_path if as_folder else tmp_path / "config.json"), 128)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_sequences_longer_than_the_model_knows_are_refused(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    assert load_without_memory(str(tmp_path), 128)
    with pytest.raises(ModelError, match=r"128 positions.*raise `n_positions`"):
        load_without_memory(str(tmp_path), 129)


def test_unknown_names_are_answered_with_those_that_there_are():
    with pytest.raises(ModelError, match=r"Did you mean llama-7b\? .*gpt2-124m"):
        load_without_memory("lama-7b", 128)
    with pytest.raises(ModelError, match="gpt2-124m") as raised:
        load_without_memory("42", 128)
    assert "mean" not in str(raised.value)


def test_a_folder_without_a_configuration_is_told_so(tmp_path):
    with pytest.raises(ModelError, match=r"The folder .* has no config\.json"):
        load_without_memory(str(tmp_path), 128)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"{}", b"model_type = 1", b'{"model_type": "no-such"}'])
def test_files_that_are_no_configuration_are_refused(tmp_path, content):
    if content.startswith(b'{"m'):
        pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError):
        load_without_memory(str(tmp_path), 128)


def test_without_transformers_the_remedy_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"\.\[hf\]"):
        load_without_memory(str(tmp_path), 128)


def test_a_mixture_of_experts_keeps_what_it_really_keeps():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=96, num_local_experts=4)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    tokens = torch.randint(96, (4, 129))
    with Ledger([*model.parameters(), tokens]) as ledger:
        kept = language_loss(model, tokens)
    really = ledger.spent().left_bytes
    del kept
    found = rehearse_resident(model, MemoryConfig(), 4, 128)
    assert found.spent.kept_bytes == pytest.approx(really, rel=0.01)
    experts = 2 * 3 * 2 * 4 * 128 * 128 * 256 * 2  # blocks, matrices, experts of each token, tokens
    assert found.probe.flops > experts
    assert rehearse_pieces(model, "split8", 4, 128, 1).forward.flops > experts / 2
    assert plan(model, "2GB", "4GB", tokens=512, context=128).best.memory.mode == "resident"


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def written(folder: Path, **changes: Any) -> str:
    pytest.importorskip("transformers", reason="transformers is not installed")
    settings = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 1}, r"`num_hidden_layers` is 1\. Give a model of 2"),
        ({"num_hidden_layers": 1_000_000}, "more than the 256 layers"),
        ({"model_type": "gpt2", "n_layer": 1, "num_hidden_layers": None}, "`n_layer` is 1"),
        ({"hidden_size": "abc"}, r"expected int, got str.*Correct the file"),
        ({"hidden_size": 255}, r"255.* is not a multiple"),
    ],
)
def test_sizes_that_cannot_be_are_named_with_their_key(tmp_path, changes, words):
    with pytest.raises(ModelError, match=words) as refused:
        load_without_memory(written(tmp_path, **changes), 128)
    assert "ModuleList" not in str(refused.value)


def test_what_a_file_leaves_out_is_remarked(tmp_path):
    def remarks(**changes: Any) -> tuple[str, ...]:
        return remarks_on(written(tmp_path, **changes), load_without_memory(str(tmp_path), 128))

    assert remarks() == ()
    (told,) = remarks(hidden_size=None, vocab_size=None)
    assert "hidden_size = 4096, vocab_size = 32000: these are defaults" in told
    assert remarks(model_type="gpt2", n_embd=64, n_layer=2, n_head=4, hidden_size=None) == ()
    (told,) = remarks(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert "not counted" in told


def test_remarks_are_in_the_plan(tmp_path):
    found = plan(written(tmp_path, vocab_size=None), "2GB", "4GB", tokens=128, context=128)
    assert len(found.remarks) == 1
    assert found.remarks[0] in as_text(found).splitlines()
    assert as_data(found)["remarks"] == list(found.remarks)
