"""Blocks computed again: the same bits, less memory, and nothing left behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.memory.support import batches, build
from torch import Tensor, nn

from hybridtrainer.blocks import Around
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.memory import recompute
from hybridtrainer.memory.products import with_products_kept
from hybridtrainer.memory.recompute import Keep, recompute_blocks
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import GPT, build_gpt, gpt_loss
from hybridtrainer.planning.pieces import without_memory
from hybridtrainer.planning.rehearsal import rehearse
from hybridtrainer.trainer import HybridTrainer

TOKENS = torch.randint(0, 96, (4, 17), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(3)
    loss = gpt_loss(model, TOKENS).mean()
    return [
        loss,
        *torch.autograd.grad(loss, [parameter for parameter in model.parameters() if parameter.requires_grad]),
    ]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("every", [1, 2, 3, 99])
def test_results_are_the_same_bits_with_dropout_too(every):
    model = build()
    assert model.config.dropout > 0
    expected = gradients(model)
    recompute_blocks(model, every)
    assert equal(gradients(model), expected)


def test_without_gradients_blocks_run_as_they_are():
    model = build().eval()
    with torch.no_grad():
        expected = model(TOKENS[:, 1:])
        recompute_blocks(model, 2)
        assert torch.equal(model(TOKENS[:, 1:]), expected)


def test_it_can_be_changed_and_taken_back():
    model = build()
    own = [block.forward for block in model.blocks]
    expected = gradients(model)
    recompute_blocks(model, 2)
    recompute_blocks(model, 3)
    assert equal(gradients(model), expected)
    recompute_blocks(model, 0)
    assert [block.forward for block in model.blocks] == own


def test_what_is_kept_can_be_changed_from_one_pass_to_the_next(monkeypatch):
    model = build()
    expected = gradients(model)
    segments = recompute_blocks(model, 2)
    asked: list[str] = []

    def noted(segment: Any) -> Any:
        asked.append("products")
        return with_products_kept(segment)

    monkeypatch.setattr(recompute, "with_products_kept", noted)
    assert equal(gradients(model), expected) and asked == []
    segments.keep = "products"
    assert equal(gradients(model), expected) and asked == ["products"] * 2
    segments.keep = "inputs"
    assert equal(gradients(model), expected) and asked == ["products"] * 2


@pytest.mark.parametrize("keep", ["inputs", "products"])
def test_a_compiled_model_has_the_same_gradients(keep):
    model = build().eval()
    expected = gradients(model)
    recompute_blocks(model, 2, keep)
    found = gradients(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(found, expected, strict=True))


def peak(every: int, keep: Keep = "inputs") -> int:
    model = without_memory(build_gpt("gpt2-124m", context=512, vocabulary=256, device="meta"))
    recompute_blocks(model, every, keep)
    tokens = torch.empty(8, 513, dtype=torch.long, device="meta")
    weights = list(model.parameters())
    return rehearse(lambda: torch.autograd.grad(gpt_loss(model, tokens).mean(), weights), weights).peak_bytes


def test_half_of_the_activations_and_more_are_saved():
    gradients_alone = 4 * sum(
        parameter.numel() for parameter in build_gpt("gpt2-124m", device="meta").blocks.parameters()
    )
    plain, one, two, all_ = (peak(every) - gradients_alone for every in (0, 1, 2, 12))
    assert one < 0.5 * plain and two < 0.5 * plain
    assert 2 * one < peak(1, "products") - gradients_alone < 0.75 * plain
    assert all_ > 0.9 * plain  # one segment keeps all of it while it is computed again


def test_frozen_blocks_and_inputs_without_gradients_work():
    model = build()
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    expected = gradients(model)
    recompute_blocks(model, 2)
    assert equal(gradients(model), expected)


@pytest.mark.parametrize("kind", ["LlamaConfig", "GPT2Config"])
@pytest.mark.parametrize("keep", ["inputs", "products"])
@pytest.mark.parametrize("every", [1, 2])
def test_decoders_of_hugging_face(kind, every, keep):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes, vocab_size=96, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config).train()

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = run()
    recompute_blocks(model, every, keep)
    assert equal(run(), expected)


class Pair(nn.Module):
    """Returns the hidden state and something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.linear(x).tanh(), "beside"


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, beside = block(x)
            assert beside == "beside"
            self.seen.append(weakref.ref(x))
        return x


@pytest.mark.parametrize("keep", ["inputs", "products"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_what_blocks_return_beside_the_hidden_state_is_returned_and_no_graph_is_kept(every, keep):
    torch.manual_seed(0)
    model, x = Pairs(), torch.randn(2, 4)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    recompute_blocks(model, every, keep)
    out = model(x)
    assert equal(list(torch.autograd.grad(out.sum(), list(model.parameters()))), list(expected))
    del out
    gc.collect()
    assert len(model.seen) == 8
    assert not any(reference() is not None for reference in model.seen)


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"hidden": x}


def test_models_it_cannot_work_with_are_refused():
    with pytest.raises(ModelError, match="No repeated blocks"):
        recompute_blocks(nn.Linear(2, 2), 1)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), Odd()) for _ in range(2)))
    recompute_blocks(blocks, 2)
    with pytest.raises(ModelError, match="checkpoint_every"):
        blocks(torch.ones(1, 2, requires_grad=True))


def test_the_trainer_does_as_its_configuration_says():
    losses = []
    for every in (0, 2):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        config = HybridTrainerConfig(memory=MemoryConfig(checkpoint_every=every), predict="off")
        torch.manual_seed(5)
        trainer = HybridTrainer(model, optimizer, gpt_loss, config)
        losses.append([trainer.step(TOKENS).loss for _ in range(3)])
        assert isinstance(model.blocks[0].forward, Around) == bool(every)
    assert losses[0] == losses[1]


def test_a_streamed_model_has_it_already():
    model = stream(build(), MemoryConfig(mode="fp32"), "cpu")
    assert isinstance(model, GPT)
    config = HybridTrainerConfig(memory=MemoryConfig(mode="fp32", checkpoint_every=2))
    with pytest.raises(ModelError, match="always computed again"):
        HybridTrainer(model, None, gpt_loss, config)


def test_a_weight_that_is_used_twice_outside_the_blocks_is_cast_once():
    """So that its gradients are summed as they are without checkpoints, to the bit."""

    def trained(every: int) -> list[Tensor]:
        model = build()
        recompute_blocks(model, every)
        (batch,) = batches(1)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(batch[:, :-1])
            loss = torch.stack([model.head(part).logsumexp(-1).sum() for part in hidden.split(1)]).sum()
        return list(torch.autograd.grad(loss, [model.head.weight]))

    assert equal(trained(1), trained(0))


def test_between_segments_no_copies_of_weights_in_16_bits_are_held(monkeypatch):
    model = build()
    recompute_blocks(model, 1)
    cleared: list[bool] = []
    clear = torch.clear_autocast_cache

    def noted() -> None:
        cleared.append(True)
        clear()

    monkeypatch.setattr(torch, "clear_autocast_cache", noted)
    with torch.autocast("cpu", torch.bfloat16):
        gpt_loss(model, batches(1)[0])
        assert len(cleared) == len(model.blocks)
