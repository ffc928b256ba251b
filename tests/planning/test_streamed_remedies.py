"""Which settings take less of the GPU with a streamed model: planned, and those that cost the least first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.post_mortem import BACKWARD_OF_A_BLOCK, OUTSIDE_THE_BLOCKS, Place, in_a_block
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import GPT, GPTConfig
from hybridtrainer.planning import streamed_remedies
from hybridtrainer.planning.hardware import H200
from hybridtrainer.planning.pieces import rehearse_pieces
from hybridtrainer.planning.streamed import estimate_streamed
from hybridtrainer.planning.streamed_remedies import (
    StreamedSituation,
    plan_streamed,
    streamed_edits,
    streamed_situation,
)

SAMPLES, CONTEXT = 16, 64
TOKENS = torch.zeros(SAMPLES, CONTEXT + 1, dtype=torch.long)
ONE_AT_A_TIME = in_a_block(BACKWARD_OF_A_BLOCK, divisible=True, split=1)


def deep_gpt(dropout: float = 0.0) -> GPT:
    return GPT(GPTConfig("llama", 16, 64, 2, vocabulary=64, context=CONTEXT, tied=False, dropout=dropout))


def situation(
    batch: Any = TOKENS, place: Place | None = ONE_AT_A_TIME, accumulate: int = 1, **memory: Any
) -> StreamedSituation:
    model = stream(deep_gpt(), MemoryConfig(**{"mode": "split8"} | memory), "cpu")
    assert isinstance(model.optimizer, StreamedOptimizer)
    return streamed_situation(model, model.optimizer, "fp32", accumulate, batch, place)


def settings(given: StreamedSituation) -> list[str]:
    return [edit.setting for edit in streamed_edits(given, plan_streamed(given))]


def test_the_plan_is_that_of_the_model_before_it_was_streamed_in_the_parts_that_were_tried():
    given = situation()
    pieces = rehearse_pieces(deep_gpt(), "split8", SAMPLES, CONTEXT, SAMPLES)
    assert plan_streamed(given) == estimate_streamed(pieces, given.memory, None, keeps=False)
    assert given.memory.split == SAMPLES and situation(place=OUTSIDE_THE_BLOCKS).memory.split == 1


def test_every_change_saves_what_a_plan_with_it_says():
    given = situation()
    now = plan_streamed(given)
    assert now is not None
    edits = {edit.setting: edit for edit in streamed_edits(given, now)}
    assert all(edit.saved_bytes is None or edit.saved_bytes > 0 for edit in edits.values())
    fewer = plan_streamed(situation(max_gpu_blocks=1))
    offloaded = plan_streamed(situation(offload_activations=True))
    smaller = plan_streamed(situation(batch=TOKENS[:8]))
    assert fewer is not None and offloaded is not None and smaller is not None
    assert edits["memory.max_gpu_blocks = 1"].saved_bytes == now.gpu_bytes - fewer.gpu_bytes
    assert edits["memory.offload_activations = true"].saved_bytes == now.gpu_bytes - offloaded.gpu_bytes
    assert 'memory.mode = "sr8"' in edits and "model.context = 32" in edits
    assert "memory.split = 32" not in edits  # one sample at a time was tried


@pytest.mark.slow
def test_the_batch_is_halved_without_another_training_where_gradients_are_kept():
    assert "train.batch_size = 8" in settings(situation())
    exact = settings(situation(clipping="exact"))
    assert "train.batch_size = 8 with train.accumulate = 2" in exact and 'memory.clipping = "fused"' in exact
    assert 'memory.clipping = "fused"' not in settings(situation(clipping="exact", accumulate=2))


def test_what_draws_random_numbers_is_to_be_divided_from_the_start():
    assert "memory.split = 2" in settings(situation(place=in_a_block(BACKWARD_OF_A_BLOCK, divisible=False, split=1)))


def test_what_is_outside_the_blocks_is_to_be_computed_in_tiles():
    assert "`language_loss` as the loss" in settings(situation(place=OUTSIDE_THE_BLOCKS))
    assert "`language_loss` as the loss" not in settings(situation())


def test_those_that_cost_the_least_time_come_first_where_speeds_are_known(monkeypatch):
    monkeypatch.setattr(streamed_remedies, "_speeds", lambda _: H200)
    given = situation()
    edits = streamed_edits(given, plan_streamed(given))
    times = [edit.more_time for edit in edits if edit.more_time is not None]
    assert len(times) >= 4 and times == sorted(times)
    assert [edit.more_time is None for edit in edits] == sorted(edit.more_time is None for edit in edits)


@pytest.mark.parametrize("batch", [None, torch.zeros(4, 8), "text", {"labels": TOKENS}])
def test_a_batch_that_is_not_of_tokens_has_changes_without_figures(batch):
    given = situation(batch=batch)
    assert plan_streamed(given) is None
    edits = streamed_edits(given, None)
    assert "memory.offload_activations = true" in [edit.setting for edit in edits]
    assert all(edit.saved_bytes is None and edit.more_time is None for edit in edits)


def test_tokens_are_found_in_what_hugging_face_and_loaders_give():
    for batch, context in (({"input_ids": TOKENS}, CONTEXT + 1), ([TOKENS], CONTEXT)):
        given = situation(batch=batch)
        assert (given.samples, given.context) == (SAMPLES, context)


def test_the_streamed_model_stays_as_it_is_and_no_random_number_is_drawn():
    model = stream(deep_gpt(), MemoryConfig(mode="split8"), "cpu")
    optimizer, before = model.optimizer, torch.get_rng_state()
    assert isinstance(optimizer, StreamedOptimizer)
    forwards = [block.forward for block in model.blocks]  # type: ignore[union-attr]
    given = streamed_situation(model, optimizer, "adaptive", 1, TOKENS, None)
    streamed_edits(given, plan_streamed(given))
    assert model.optimizer is optimizer and torch.equal(torch.get_rng_state(), before)
    assert [block.forward for block in model.blocks] == forwards  # type: ignore[union-attr]
    assert isinstance(given.model, nn.Module) and all(each.is_meta for each in given.model.parameters())
    assert not hasattr(given.model, "optimizer") and given.memory.precision == "bf16"
