"""What averages take is what is made of them: the same count for who keeps them and for who plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support import cnn_setup, gpt_setup
from torch import Tensor, nn

from hybridtrainer import HybridTrainerConfig, MemoryConfig, ranks, stream
from hybridtrainer.models.gpt import build_gpt
from hybridtrainer.planning.pieces import without_memory
from hybridtrainer.predict.averages import DECAYS, NO_AVERAGES, ROOM, averages_here, averages_of, usable_bytes
from hybridtrainer.predict.host_average import HostAverage
from hybridtrainer.predict.readout import make_readout
from hybridtrainer.state import Training
from hybridtrainer.tree import Tree

GIB = 1 << 30


def tensors_in(tree: Tree) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for each in inner for tensor in tensors_in(each)]


def training_of(model: nn.Module) -> Training:
    own: Any = getattr(model, "optimizer", None)
    return Training(model, own or torch.optim.SGD(model.parameters(), lr=0.1), None, None)


def half_frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 20).requires_grad_(False), nn.Linear(20, 10), nn.BatchNorm1d(10))


@pytest.mark.parametrize("settings", [{}, {"predict": "off"}, {"readout": "last"}, {"readout": "averaged"}])
@pytest.mark.parametrize("make", [lambda: gpt_setup(count=1).model, lambda: cnn_setup(count=1).model, half_frozen])
def test_what_is_planned_for_a_model_without_memory_is_what_is_kept_and_saved(make, settings):
    model, config = make(), HybridTrainerConfig(**settings)
    planned = averages_of(without_memory(model), config, 100 * GIB)
    training = training_of(model)
    readout = make_readout(training, config, lambda: [[0.0]], print)
    readout.observe()
    kept = sum(tensor.nbytes for tensor in tensors_in(readout.state()))
    assert planned == averages_here(training, config, has_probes=True)
    assert (planned.device_bytes, planned.saved_bytes, planned.host_bytes) == (kept, kept, 0)
    one = {0: 0, 1: kept, len(DECAYS): kept // len(DECAYS)}[planned.copies]
    assert bool(one) == (settings.get("readout") == "averaged" or not settings)


@pytest.mark.parametrize("mode", ["split8", "fp32", "sr8"])
def test_the_average_of_a_streamed_model_takes_host_memory_alone(mode):
    bare = build_gpt("nano", device="meta")
    config = HybridTrainerConfig(readout="averaged")
    planned = averages_of(bare, config, 8 * GIB, is_streamed=True)
    model = stream(build_gpt("nano"), MemoryConfig(mode=mode), "cpu", lr=1e-3)
    readout = make_readout(training_of(model), config, None, print)
    assert isinstance(readout, HostAverage)
    readout.observe()
    average = sum(tensor.nbytes for tensor in tensors_in(readout.state()))
    beside = sum(tensor.nbytes for tensor in tensors_in(readout._own()))
    assert planned.device_bytes == 0 and planned.saved_bytes == average
    assert 0.7 * planned.host_bytes < average + beside <= planned.host_bytes
    assert averages_of(bare, HybridTrainerConfig(), 1000 * GIB, is_streamed=True) == NO_AVERAGES


def test_nobody_chooses_without_probes_or_on_several_ranks(monkeypatch):
    model, config = nn.Linear(2, 2), HybridTrainerConfig()
    assert averages_of(model, config, None).copies == len(DECAYS)
    assert averages_of(model, config, None, has_probes=False) == NO_AVERAGES
    monkeypatch.setattr(ranks, "count", lambda: 2)
    assert averages_of(model, config, None) == NO_AVERAGES
    assert averages_of(model, HybridTrainerConfig(readout="averaged"), None).copies == 1


def test_those_that_nobody_asked_for_are_small_beside_what_may_be_used():
    model = nn.Linear(1000, 1000, bias=False)
    room = int(len(DECAYS) * 4_000_000 / ROOM)
    assert averages_of(model, HybridTrainerConfig(), room).device_bytes == 8_000_000
    assert averages_of(model, HybridTrainerConfig(), room - 1) == NO_AVERAGES
    assert averages_of(model, HybridTrainerConfig(readout="averaged"), 1000).device_bytes == 4_000_000


@pytest.mark.parametrize(
    ("vram", "fraction", "usable"), [(None, 1.0, 100), ("40GB", 1.0, 40), (None, 0.5, 50), ("90GB", 0.5, 50)]
)
def test_a_gpu_may_be_used_as_far_as_the_process_and_the_budget_allow(monkeypatch, vram, fraction, usable):
    weight = SimpleNamespace(is_cuda=True, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100 * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction)
    model: Any = SimpleNamespace(parameters=lambda: [weight])
    assert usable_bytes(model, vram) == usable * GIB
    assert usable_bytes(nn.Linear(1, 1), vram) is None
