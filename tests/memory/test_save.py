"""Weights written in Hugging Face's naming: what is read back is what was there."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from tests.memory.support import LLAMA, SMALL, batches, build, streamed, train
from torch import nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import SaveError
from hybridtrainer.memory.load import load_weights_
from hybridtrainer.memory.save import INDEX, SINGLE, save_weights
from hybridtrainer.models.gpt import gpt_loss


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["tied", "untied"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000], ids=["one file", "shards"])
def test_a_streamed_model_comes_back_from_its_files(tmp_path, config, shard_bytes):
    model, optimizer = streamed(MemoryConfig(mode="split8"), model=build(config, seed=3))
    train(model, optimizer, batches(3))
    files = save_weights(model, tmp_path / "weights", shard_bytes)
    assert (len(files) > 2) == (shard_bytes == 20_000)
    again, _ = streamed(MemoryConfig(mode="split8"), model=build(config, seed=4))
    load_weights_(again, tmp_path / "weights")
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_an_update_that_is_still_due_is_in_the_files(tmp_path):
    model, optimizer = streamed(MemoryConfig(mode="fp32", clipping="exact"), model=build(LLAMA))
    before = model.get_parameter("blocks.0.mlp.up.weight").clone()
    gpt_loss(model, batches(1)[0]).mean().backward()
    optimizer.step()
    save_weights(model, tmp_path)
    with safe_open(tmp_path / SINGLE, framework="pt") as file:
        assert not torch.equal(file.get_tensor("blocks.0.mlp.up.weight"), before)


def test_others_are_written_in_the_place_of_parameters(tmp_path):
    model, _ = streamed(MemoryConfig(mode="split8"), model=build(LLAMA))
    own, other = (model.get_parameter(f"blocks.{number}.mlp.up.weight") for number in (1, 0))
    save_weights(model, tmp_path, instead={id(own): other})
    with safe_open(tmp_path / SINGLE, framework="pt") as file:
        assert torch.equal(file.get_tensor("blocks.1.mlp.up.weight"), other)
        assert not torch.equal(other, own)


def test_the_index_names_every_weight_once_and_the_file_that_has_it(tmp_path):
    model = build(LLAMA)
    save_weights(model, tmp_path, shard_bytes=20_000)
    index = json.loads((tmp_path / INDEX).read_text())
    assert sorted(index["weight_map"]) == sorted(name for name, _ in model.named_parameters())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            assert torch.equal(shard.get_tensor(name), model.get_parameter(name))
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in model.parameters())


def test_a_save_in_fewer_files_leaves_no_shard_of_the_one_before(tmp_path):
    model = build(LLAMA)
    save_weights(model, tmp_path, shard_bytes=20_000)
    save_weights(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]


def test_buffers_that_belong_into_a_file_are_in_it_and_come_back(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model(torch.randn(8, 3))
    save_weights(model, tmp_path)
    again = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    load_weights_(again, tmp_path)
    assert {name: value.tolist() for name, value in again.state_dict().items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }


def test_a_folder_that_cannot_be_written_is_a_save_error(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(SaveError, match="were not written"):
        save_weights(build(LLAMA), tmp_path / "taken")
