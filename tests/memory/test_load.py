from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.memory.support import LLAMA, SMALL, batches, build, streamed
from torch import nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.memory.load import load_weights_
from hybridtrainer.models.gpt import GPT, gpt_loss


def saved(model: nn.Module, folder: Path, files: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    names = list(tensors)
    for number in range(files):
        part = {name: tensors[name] for name in names[number::files]}
        save_file(part, folder / f"model-{number}.safetensors")
    return folder


def on_meta(config: Any) -> GPT:
    with torch.device("meta"):
        return GPT(config)


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["tied", "untied"])
def test_a_model_without_memory_is_filled_from_files_as_if_it_had_been_there(tmp_path, config):
    original = build(config, seed=3).eval()
    model, _ = streamed(MemoryConfig(mode="fp32"), model=on_meta(config))
    load_weights_(model, saved(original, tmp_path / "weights"))
    data = batches(1)[0]
    assert torch.equal(gpt_loss(model.eval(), data), gpt_loss(original, data))


def test_split_weights_are_filled_to_the_last_bit(tmp_path):
    original = build(LLAMA, seed=3)
    model, _ = streamed(MemoryConfig(mode="split8"), model=on_meta(LLAMA))
    load_weights_(model, saved(original, tmp_path / "weights"))
    for name, parameter in model.named_parameters():
        exact = parameter.home.read(0, parameter.numel())  # type: ignore[attr-defined]
        assert torch.equal(exact.view(parameter.shape), original.get_parameter(name))


def test_what_was_fetched_before_is_fetched_anew(tmp_path):
    original = build(LLAMA, seed=3)
    model, _ = streamed(MemoryConfig(mode="fp32", max_gpu_blocks=99), model=build(LLAMA))
    data = batches(1)[0]
    gpt_loss(model, data)
    load_weights_(model, saved(original, tmp_path / "weights"))
    assert torch.equal(gpt_loss(model, data), gpt_loss(original, data))


def test_a_model_that_fits_can_be_filled_too(tmp_path):
    original, model = build(LLAMA, seed=3), build(LLAMA)
    load_weights_(model, saved(original, tmp_path / "weights", files=1) / "model-0.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))


def test_a_tied_weight_may_have_either_name(tmp_path):
    original, model = build(SMALL, seed=3), build(SMALL)
    tensors = {name: parameter.detach().clone() for name, parameter in original.named_parameters()}
    tensors["head.weight"] = tensors.pop("embedding.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights_(model, tmp_path)
    assert torch.equal(model.embedding.weight, original.embedding.weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("norm.weight"), "it lacks norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "it has extra, which is not here"),
        (lambda tensors: tensors.update({"norm.weight": torch.zeros(3)}), r"norm.weight is \(3,\) there"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(tmp_path, change, words):
    model, optimizer = streamed(MemoryConfig(mode="split8"), model=build(LLAMA))
    optimizer.settle()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tensors = {name: parameter.detach().clone() for name, parameter in build(LLAMA, seed=3).named_parameters()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        load_weights_(model, tmp_path)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_files_that_are_not_there_or_no_weights_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no weights at"):
        load_weights_(build(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="cannot be read"):
        load_weights_(build(), tmp_path)
