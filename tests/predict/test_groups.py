"""Which parameters are forecast together."""

from __future__ import annotations

import pytest
import torch
from tests.support import tiny_gpt
from torch import nn

from hybridtrainer.models.cnn import CNN, CNNConfig
from hybridtrainer.predict.groups import ROLES, group_parameters
from hybridtrainer.weights import WeightGroup


def names_of(model: nn.Module, group: WeightGroup) -> set[str]:
    return {
        name for name, parameter in model.named_parameters() if any(parameter is member for member in group.parameters)
    }


def grouped(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, set[str]]:
    groups = group_parameters(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1))
    assert len({(group.name, group.lr_group) for group in groups}) == len(groups)
    return {f"{group.name} {group.lr_group}": names_of(model, group) for group in groups}


@pytest.mark.parametrize("flavour", ["gpt2", "llama"])
def test_a_decoder_is_grouped_by_role(flavour):
    model = tiny_gpt(flavour=flavour)
    found = grouped(model)
    assert "embedding.weight" in found["embedding 0"]
    assert found["attention 0"] == {f"blocks.{i}.attention.{part}.weight" for i in (0, 1) for part in ("qkv", "out")}
    assert found["mlp 0"] == {f"blocks.{i}.mlp.{part}.weight" for i in (0, 1) for part in ("up", "down")}
    assert {"norm.weight", "blocks.0.attention_norm.weight"} <= found["norms and biases 0"]
    assert set(found) == {"embedding 0", "attention 0", "mlp 0", "norms and biases 0"}  # the head is the embedding


def test_a_conv_net_has_a_head_and_others():
    found = grouped(CNN(CNNConfig((4, 4, 4), batch_norm=True)))
    assert found["head 0"] == {"head.weight"}
    assert found["other 0"] == {"features.0.weight", "features.4.weight", "features.8.weight"}
    assert "head.bias" in found["norms and biases 0"]


@pytest.mark.parametrize("model", [tiny_gpt(), CNN(CNNConfig((4, 4, 4)))], ids=["gpt", "cnn"])
def test_every_trainable_parameter_is_in_one_group_and_groups_come_in_a_fixed_order(model):
    groups = group_parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    members = [id(parameter) for group in groups for parameter in group.parameters]
    assert sorted(members) == sorted(id(parameter) for parameter in model.parameters())
    assert [group.name for group in groups] == sorted((group.name for group in groups), key=ROLES.index)


def test_learning_rates_split_a_role():
    model = tiny_gpt()
    first = list(model.blocks[0].parameters())
    rest = [p for p in model.parameters() if all(p is not other for other in first)]
    optimizer = torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": rest, "lr": 0.2}])
    found = grouped(model, optimizer)
    assert found["mlp 0"] == {"blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight"}
    assert found["mlp 1"] == {"blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight"}


def test_frozen_and_unowned_parameters_are_left_out():
    model = tiny_gpt()
    model.get_parameter("blocks.0.mlp.up.weight").requires_grad_(False)
    owned = [p for name, p in model.named_parameters() if name != "blocks.1.mlp.up.weight"]
    found = grouped(model, torch.optim.SGD(owned, lr=0.1))
    assert found["mlp 0"] == {"blocks.0.mlp.down.weight", "blocks.1.mlp.down.weight"}


def test_tied_weights_appear_once():
    model = tiny_gpt()
    groups = group_parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert sum(parameter is model.head.weight for group in groups for parameter in group.parameters) == 1


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("layer.q_proj", "attention"),
        ("model.self_attn.out", "attention"),
        ("ffn.w1", "mlp"),
        ("block.c_fc", "mlp"),
        ("lm_head", "head"),
        ("Classifier", "head"),
        ("conv1", "other"),
    ],
)
def test_roles_are_recognized_by_common_names(name, role):
    model = nn.Module()
    inner = model
    *path, leaf = name.split(".")
    for part in path:
        inner.add_module(part, nn.Module())
        inner = inner.get_submodule(part)
    inner.add_module(leaf, nn.Linear(3, 3, bias=False))
    assert list(grouped(model)) == [f"{role} 0"]
