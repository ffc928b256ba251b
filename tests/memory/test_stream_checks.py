"""What `stream` cannot follow is refused before anything of the model is moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.memory.small import Stack, equal, stack, stream_stack, train, weights
from torch import nn

from hybridtrainer.config import RunConfig
from hybridtrainer.config_conflicts import conflicts
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import MemoryBudgetError, ModelError
from hybridtrainer.memory.stream import stream

NAN = float("nan")


@pytest.fixture
def untouched() -> Iterator[Stack]:
    """A model that must be as it was at the end."""
    model: Stack = stack()
    before = {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()}
    attributes = [set(vars(module)) for module in model.modules()]
    yield model
    assert {name: (id(each), each.data_ptr()) for name, each in model.named_parameters()} == before
    assert [set(vars(module)) for module in model.modules()] == attributes


NONSENSE: list[dict[str, Any]] = [
    {"lr": -1.0}, {"lr": NAN}, {"lr": float("inf")}, {"lr": "1e-3"}, {"lr": torch.tensor(-1.0)}, {"betas": (1.5, 0.9)},
    {"betas": (0.9, 1.0)}, {"betas": (0.9, NAN)}, {"betas": 0.9}, {"betas": (0.9,)}, {"eps": -1.0}, {"eps": NAN},
    {"weight_decay": -1.0}, {"weight_decay": None},
]  # fmt: skip


@pytest.mark.parametrize("settings", NONSENSE, ids=str)
def test_settings_that_adamw_cannot_follow_are_refused(untouched, settings):
    (name,) = settings
    with pytest.raises(ModelError, match=rf"^{name} is .* Give "):
        stream_stack(untouched, **settings)
    with pytest.raises(ModelError, match=rf"^{name} of parameter group 0 is .* Give "):
        stream_stack(untouched, param_groups=[{"params": list(untouched.parameters()), **settings}])


@pytest.mark.parametrize("clip_norm", [-1.0, 0.0, NAN, "1"], ids=str)
def test_a_norm_that_would_turn_gradients_round_is_refused(untouched, clip_norm):
    with pytest.raises(ModelError, match=r"clip_norm is .* positive number, or None"):
        stream_stack(untouched, clip_norm=clip_norm)


@pytest.mark.parametrize("lr", [0.0, 1, torch.tensor(0.1)], ids=str)
def test_settings_at_the_edge_are_taken(lr):
    _, optimizer, _ = stream_stack(lr=lr, betas=[0.0, 0.0], eps=0, weight_decay=0.0, clip_norm=float("inf"))
    assert optimizer.param_groups[0]["lr"] == lr


@pytest.mark.parametrize(
    "asked", [{"amsgrad": True}, {"maximize": True}, {"fused": True}, {"momentum": 0.9}, {"lr_scale": 0.5}], ids=str
)
def test_what_a_group_asks_for_and_nothing_would_do_is_refused(untouched, asked):
    (name,) = asked
    with pytest.raises(ModelError, match=f"{name} of parameter group 1 is .* does not read it"):
        stream_stack(
            untouched,
            param_groups=[
                {"params": [untouched.head.weight]},
                {"params": list(untouched.blocks.parameters()), **asked},
            ],
        )


def test_groups_of_torchs_own_adamw_are_taken():
    model = stack()
    groups = torch.optim.AdamW(model.parameters(), lr=0.3).param_groups
    _, optimizer, _ = stream_stack(model, param_groups=groups)
    assert optimizer.param_groups[0]["lr"] == 0.3


SAME: dict[str, Callable[[nn.Module], Any]] = {
    "generator in a group": lambda model: [{"params": model.parameters()}],
    "generator of groups": lambda model: ({"params": [each]} for each in model.parameters()),
    "generator of parameters": lambda model: model.parameters(),
    "list of parameters": lambda model: list(model.parameters()),
}


@pytest.mark.parametrize("groups", SAME.values(), ids=SAME.keys())
def test_parameters_come_as_torchs_optimizers_take_them(groups):
    model, expected = stack(), stack()
    model, optimizer, _ = stream_stack(model, param_groups=groups(model))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert train(model, optimizer, 3) == train(expected, torch.optim.AdamW(groups(expected), lr=0.1, foreach=False), 3)
    assert equal(weights(model), weights(expected))


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "one parameter": (lambda model: model.head.weight, "no list of groups"),
    "one group": (lambda model: {"params": list(model.parameters())}, "no list of groups"),
    "names too": (lambda model: model.named_parameters(), "no list of groups"),
    "no parameters": (lambda _: [{"lr": 0.1}], "no list of groups"),
    "mixed": (lambda model: [model.head.weight, {"params": []}], "no list of groups"),
    "a number": (lambda _: 3, "no list of groups"),
    "names in a group": (lambda model: [{"params": list(model.named_parameters())}], "are not the model's"),
    "a set": (lambda model: [{"params": set(model.parameters())}], "order changes"),
    "twice": (lambda model: [{"params": model.parameters()}, {"params": [model.head.weight]}], "once: head.weight"),
    "none": (lambda _: [], "are in no group"),
}


@pytest.mark.parametrize(("groups", "message"), WRONG.values(), ids=WRONG.keys())
def test_groups_that_are_none_are_refused(untouched, groups, message):
    with pytest.raises(ModelError, match=message):
        stream_stack(untouched, param_groups=groups(untouched))


AGAINST: list[dict[str, Any]] = [
    {"precision": "fp16"}, {"precision": "adaptive"}, {"optimizer_bits": 8}, {"checkpoint_every": 2},
    {"checkpoint_keep": "products"}, {"predict_int8": True}, {"predict_states": "leave"}, {"retry_smaller": False},
]  # fmt: skip


@pytest.mark.parametrize("settings", AGAINST, ids=str)
def test_memory_settings_that_do_not_go_with_it_are_refused_in_the_words_of_the_command_line(untouched, settings):
    memory = MemoryConfig(mode="split8", **settings)
    (problem,) = conflicts(RunConfig(memory=memory))
    with pytest.raises(ModelError) as raised:
        stream(untouched, memory, "cpu")
    assert raised.value.what == f"{problem.key} {problem.message}"


@pytest.mark.parametrize("memory", ["split8", None, {"mode": "split8"}], ids=str)
def test_what_is_no_settings_of_memory_is_refused(untouched, memory):
    with pytest.raises(ModelError, match=r"MemoryConfig\(mode="):
        stream(untouched, memory, "cpu")


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:99", None, "cpu:x"], ids=str)
def test_a_device_that_computes_nothing_is_refused(untouched, device):
    with pytest.raises(ModelError, match=r"device|no GPU"):
        stream(untouched, MemoryConfig(mode="split8"), device)


def test_a_model_of_frozen_parameters_is_refused(untouched):
    untouched.requires_grad_(False)
    with pytest.raises(ModelError, match="only frozen parameters: there is nothing to train"):
        stream_stack(untouched)


@pytest.mark.parametrize(
    ("mode", "clipping", "advice"),
    [
        ("fp32", "fused", "fewer bytes per parameter: split8 6, sr8 4, sr4 3, factored 2."),
        ("sr4", "exact", "parameter: factored 2. With `clipping = \"fused\"` no gradients wait"),
        ("factored", "fused", "Choose a smaller model, or find more memory: no mode takes less."),
    ],
)  # fmt: skip
def test_advice_for_too_little_memory_takes_less_memory(untouched, mode, clipping, advice):
    with pytest.raises(MemoryBudgetError) as raised:
        stream(untouched, MemoryConfig(mode=mode, clipping=clipping, ram="0.001MB"), "cpu")
    assert advice in raised.value.remedy
    assert mode not in raised.value.remedy and (clipping == "exact") == ("clipping" in raised.value.remedy)
