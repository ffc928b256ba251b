"""Which settings take less memory: rehearsed with the user's own loss, the cheapest first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import cnn_setup, gpt_setup
from torch import Tensor, nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory.recompute import recompute_blocks
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.remedies import (
    EVALUATION,
    Edit,
    Situation,
    is_worth_it,
    ranked_edits,
    rehearse_situation,
)
from hybridtrainer.planning.resident import estimate_resident, rehearse_resident
from hybridtrainer.real_step import BACKWARD, UPDATE
from hybridtrainer.state import Training


def situation(model: nn.Module, loss_fn: Any, batch: Any, doing: str = BACKWARD, **memory: Any) -> Situation:
    training = Training(model, torch.optim.AdamW(model.parameters()), None, None)
    return Situation(training, loss_fn, MemoryConfig(**memory), 1, batch, doing)


def deep_gpt() -> GPT:
    return GPT(GPTConfig("gpt2", 8, 32, 2, vocabulary=64, context=64))


TOKENS = torch.zeros(16, 65, dtype=torch.long)


def test_settings_are_ranked_by_time_and_each_saves_something():
    given = situation(deep_gpt(), gpt_loss, TOKENS)
    now = rehearse_situation(given)
    assert now is not None
    edits = ranked_edits(given, now)
    settings = [edit.setting for edit in edits]
    timed = [edit for edit in edits if edit.more_time is not None]
    assert [edit.more_time for edit in timed] == sorted(edit.more_time or 0.0 for edit in timed)
    assert edits[: len(timed)] == timed
    assert (
        "train.batch_size = 8 with train.accumulate = 2" in settings and "memory.retry_smaller = true" not in settings
    )
    again = {edit.setting: edit for edit in edits}["memory.checkpoint_every = 1"]
    assert again.more_time is not None and 0.15 < again.more_time < 1 / 3  # forward again, but for the last product
    assert again.saved_bytes is not None and again.saved_bytes > now.estimate.gpu["activations"] / 2
    assert {edit.setting: edit for edit in edits}["model.context = 32"].more_time is None
    assert all(edit.saved_bytes is None or edit.saved_bytes > 0 for edit in edits)
    assert settings[-2:] == ['memory.mode = "split8"', "no other program on this GPU"]


def test_no_more_blocks_are_computed_again_at_a_time_than_there_are():
    given = situation(GPT(GPTConfig("gpt2", 2, 32, 2, vocabulary=64, context=64)), gpt_loss, TOKENS)
    for now in (rehearse_situation(given), None):
        settings = [edit.setting for edit in ranked_edits(given, now)]
        assert [each for each in settings if "checkpoint_every" in each] == ["memory.checkpoint_every = 1"]


def test_what_saves_next_to_nothing_is_not_offered():
    plan = Estimate({"weights": 500, "activations": 500, "workspace": 1 << 20}, {}, 0, None, None)
    assert [is_worth_it(Edit("a = 1", "", saved), plan) for saved in (None, -1, 0, 9, 10)] == [
        True, False, False, False, True,
    ]  # fmt: skip
    assert is_worth_it(Edit("a = 1", "", 1), None)
    given = situation(deep_gpt(), gpt_loss, TOKENS[:1, :3])  # activations are next to nothing beside the weights
    now = rehearse_situation(given)
    assert now is not None
    assert not any("checkpoint_every" in edit.setting for edit in ranked_edits(given, now))


def test_a_price_is_what_an_estimate_with_that_setting_says():
    model = deep_gpt()
    given = situation(model, gpt_loss, TOKENS)
    edits = {edit.setting: edit for edit in ranked_edits(given, rehearse_situation(given))}
    plain, changed = (
        rehearse_situation(situation(model, gpt_loss, TOKENS, checkpoint_every=every)).estimate.gpu_bytes  # type: ignore[union-attr]
        for every in (0, 2)
    )
    assert edits["memory.checkpoint_every = 2"].saved_bytes == plain - changed
    planned = estimate_resident(rehearse_resident(model, MemoryConfig(), 16, 64)).gpu
    found = rehearse_situation(given)
    assert found is not None
    assert {name: found.estimate.gpu[name] for name in ("weights", "gradients", "optimizer states")} == {
        name: planned[name] for name in ("weights", "gradients", "optimizer states")
    }


def test_a_model_that_computes_again_already_is_rehearsed_as_it_is_and_left_so():
    model = deep_gpt()
    plain = rehearse_situation(situation(model, gpt_loss, TOKENS))
    recompute_blocks(model, 2)
    wrapped = [block.forward for block in model.blocks]
    given = situation(model, gpt_loss, TOKENS, checkpoint_every=2)
    now = rehearse_situation(given)
    assert plain is not None and now is not None and now.flops > plain.flops
    assert "memory.checkpoint_every = 2" not in [edit.setting for edit in ranked_edits(given, now)]
    assert [block.forward for block in model.blocks] == wrapped
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_inputs_alone_are_offered_where_products_are_kept():
    inputs = 'memory.checkpoint_keep = "inputs"'
    given = situation(deep_gpt(), gpt_loss, TOKENS, checkpoint_every=1, checkpoint_keep="products")
    found = {edit.setting: edit for edit in ranked_edits(given, rehearse_situation(given))}
    assert (found[inputs].saved_bytes or 0) > 0 and (found[inputs].more_time or 0) > 0
    given = situation(deep_gpt(), gpt_loss, TOKENS, checkpoint_every=1)
    assert inputs not in [edit.setting for edit in ranked_edits(given, None)]


def test_models_without_blocks_have_what_is_left():
    setup = cnn_setup(count=1)
    given = situation(setup.model, setup.loss_fn, setup.batches[0])
    settings = [edit.setting for edit in ranked_edits(given, rehearse_situation(given))]
    assert "train.batch_size = 16 with train.accumulate = 2" in settings
    assert not any("checkpoint_every" in setting or "mode" in setting for setting in settings)


def looks_at_values(model: nn.Module, tokens: Tensor) -> Tensor:
    loss = gpt_loss(model, tokens)
    print(loss.sum().item())
    return loss


def test_a_loss_that_cannot_be_rehearsed_has_changes_without_figures():
    setup = gpt_setup(count=1)
    given = situation(setup.model, looks_at_values, setup.batches[0], retry_smaller=False)
    assert rehearse_situation(given) is None
    edits = ranked_edits(given, None)
    assert "memory.retry_smaller = true" in [edit.setting for edit in edits]
    assert all(edit.more_time is None for edit in edits)
    assert [edit.setting for edit in edits if edit.saved_bytes is not None] == ["memory.optimizer_bits = 8"]


@pytest.mark.parametrize(
    ("doing", "batch", "setting"),
    [(UPDATE, TOKENS, "foreach=False for the optimizer"), (EVALUATION, None, "smaller batches to evaluate on")],
)
def test_where_no_activation_is_there_none_is_made_smaller(doing, batch, setting):
    edits = ranked_edits(situation(deep_gpt(), gpt_loss, batch, doing), None)
    assert edits[0].setting == setting or edits[1].setting == setting
    assert not any("checkpoint_every" in edit.setting for edit in edits)


def test_rehearsing_draws_no_random_number():
    setup = gpt_setup(count=1)
    before = torch.get_rng_state()
    given = situation(setup.model, setup.loss_fn, setup.batches[0])
    ranked_edits(given, rehearse_situation(given))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_change_reads_as_one_line():
    edit = Edit("memory.checkpoint_every = 4", "the same numbers", int(3.1 * 2**30), 0.24)
    assert str(edit) == "memory.checkpoint_every = 4: saves 3.10 GiB, +24% time, the same numbers"
    assert str(Edit("a = 1", "nothing")) == "a = 1: nothing"


@pytest.mark.parametrize("is_updated", [False, True])
def test_fewer_bits_of_moments_are_offered_before_there_are_any(is_updated):
    given = situation(deep_gpt(), gpt_loss, TOKENS)
    if is_updated:
        gpt_loss(given.training.model, TOKENS).mean().backward()
        given.training.optimizer.step()
    now = rehearse_situation(given)
    assert now is not None
    saved = {edit.setting: edit for edit in ranked_edits(given, now)}["memory.optimizer_bits = 8"].saved_bytes
    assert saved == pytest.approx(now.estimate.gpu["optimizer states"] * 3 / 4, rel=0.01)


@pytest.mark.parametrize(("momentum", "states"), [(0.0, 0), (0.9, 1)])
def test_moments_that_an_optimizer_never_has_are_not_planned(momentum, states):
    model = deep_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    given = replace(situation(model, gpt_loss, TOKENS), training=Training(model, optimizer, None, None))
    now = rehearse_situation(given)
    assert now is not None
    assert now.estimate.gpu.get("optimizer states", 0) == states * now.estimate.gpu["weights"]
    assert not any("optimizer_bits" in edit.setting for edit in ranked_edits(given, now))
