"""Rehearsals are made once, and batches that make no sense are refused before any is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hybridtrainer.errors import ConfigError, ModelError
from hybridtrainer.models.gpt import build_gpt
from hybridtrainer.planning import rehearsals
from hybridtrainer.planning.rehearsals import Rehearsals


def made(tokens: int = 512, context: int = 64, accumulate: int = 1) -> Rehearsals:
    return Rehearsals(build_gpt("nano", device="meta"), tokens, context, accumulate)


def test_nothing_is_rehearsed_twice(monkeypatch):
    calls: list[str] = []

    def watch(name: str) -> None:
        real = getattr(rehearsals, name)

        def watched(*args: Any) -> Any:
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(rehearsals, name, watched)

    watch("rehearse_resident")
    watch("rehearse_pieces")
    of = made()
    assert of.resident("bf16", 0) is of.resident("bf16", 0)
    assert of.resident("bf16", 0) is not of.resident("bf16", 1)
    assert of.resident("bf16", 1, "products") is not of.resident("bf16", 1)
    assert of.resident("bf16", 1, "products") is of.resident("bf16", 1, "products", offload=False)
    assert of.streamed("split8", 1).backward is of.streamed("sr4", 1).backward
    assert of.streamed("split8", 2).head is of.streamed("split8", 1).head
    assert of.streamed("split8", 1, "bf16").backward is not of.streamed("split8", 1).backward
    assert of.streamed("split8", 1, "bf16").head is of.streamed("sr8", 1).head
    assert calls == ["rehearse_resident"] * 3 + ["rehearse_pieces"] * 3


def test_splits_go_up_to_one_sample_at_a_time():
    assert made().splits() == [1, 2, 4, 8]
    assert made(tokens=64 * 6).splits() == [1, 2, 4, 6]
    assert made(tokens=64).splits() == [1]


def test_micro_batches_divide_a_resident_batch_and_no_streamed_one():
    whole, parts = made(), made(accumulate=4)
    assert parts.resident("bf16", 0).spent.flops == whole.resident("bf16", 0).spent.flops / 4
    assert parts.streamed("split8", 1).hidden_bytes == whole.streamed("split8", 1).hidden_bytes


@pytest.mark.parametrize(
    ("tokens", "context", "accumulate", "words"),
    [
        (-5, 64, 1, "tokens: must be positive"),
        (512, 0, 1, "seq: must be positive"),
        (512, 64, 0, "accumulate: must be positive"),
        (1000, 64, 1, "no whole sequences"),
        (512, 64, 3, "8 sequences are no 3 micro-batches"),
        (1 << 40, 64, 1, "more than the"),
    ],
)
def test_batches_that_make_no_sense_are_named(tokens, context, accumulate, words):
    with pytest.raises(ConfigError, match=words):
        made(tokens, context, accumulate)


def test_a_model_without_blocks_is_refused_at_once():
    with pytest.raises(ModelError, match="repeated blocks"):
        Rehearsals(build_gpt("nano", blocks=1, device="meta"), 64, 64)


def test_sizes_of_no_model_are_refused_before_anything_is_counted():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 20, 1 << 20) for _ in range(2)))
    with pytest.raises(ModelError, match="2,199 billion parameters, more than the 2,000 billion"):
        Rehearsals(model, 512, 64)


def test_half_a_batch_has_half_the_sequences_and_then_half_as_long_a_one():
    of = made(tokens=64 * 4, accumulate=4)
    assert [(each.samples, each.context, each.accumulate) for each in (of.halved(), of.halved().halved().halved())] == [
        (2, 64, 2),
        (1, 32, 1),
    ]
