"""The decoders: their sizes, what each position may see, and that they learn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import CONTEXT, take, text_splits, tiny_gpt
from torch import Tensor

from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.errors import ModelError
from hybridtrainer.kernels.rotary import split_rotated
from hybridtrainer.models.gpt import GPT, GPT_CONFIGS, GPTConfig, build_gpt, gpt_loss

SIZES = {
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-1b": 1_056_226_688,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-50b": 50_714_353_664,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_model_has_the_size_of_its_name_and_takes_no_memory_on_the_meta_device(name):
    model = build_gpt(name, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[name]
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_every_name_was_measured_but_the_small_ones():
    assert set(GPT_CONFIGS) - set(SIZES) == {"nano", "nano-llama", "mini"}


def test_an_unknown_name_is_refused_with_those_that_exist():
    with pytest.raises(ModelError, match=r"'gpt5'.*nano, nano-llama, mini, gpt2-124m"):
        build_gpt("gpt5")


def test_vocabulary_context_and_dropout_can_be_chosen():
    model = build_gpt("nano", vocabulary=300, context=16, dropout=0.25)
    assert model(torch.zeros(2, 16, dtype=torch.long)).shape == (2, 16, 300)
    assert model.config.dropout == 0.25
    assert build_gpt("nano").config == GPT_CONFIGS["nano"]


FLAVOURS: dict[str, dict[str, Any]] = {
    "gpt2": {"flavour": "gpt2"},
    "llama": {"flavour": "llama"},
    "llama with two heads for four": {"flavour": "llama", "kv_heads": 2},
    "llama with one head for four": {"flavour": "llama", "kv_heads": 1},
    "gpt2 with two heads for four": {"flavour": "gpt2", "kv_heads": 2},
    "untied": {"flavour": "gpt2", "tied": False},
}


def small(name: str, **options: Any) -> GPT:
    torch.manual_seed(0)
    settings = {"blocks": 2, "width": 32, "heads": 4, "vocabulary": 50, "context": 12}
    model = GPT(GPTConfig(**(settings | FLAVOURS[name] | options)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # at its initial size every attention is nearly uniform
    return model


@pytest.mark.parametrize("name", FLAVOURS)
def test_a_later_token_does_not_change_earlier_logits(name):
    model = small(name)
    tokens = torch.randint(50, (2, 12))
    before = model(tokens)
    for position in (1, 5, 11):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 50
        after = model(changed)
        assert torch.equal(after[:, :position], before[:, :position])
        for later in range(position, 12):
            assert not torch.allclose(after[:, later], before[:, later], rtol=1e-3), (
                later
            )  # and every later one sees it


@pytest.mark.parametrize("name", FLAVOURS)
def test_the_order_of_earlier_tokens_matters(name):
    model = small(name)
    a, b = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(model(a)[0, -1], model(b)[0, -1], rtol=1e-3)


@pytest.mark.parametrize("name", FLAVOURS)
def test_samples_of_a_batch_do_not_see_each_other(name):
    model = small(name)
    tokens = torch.randint(50, (3, 12))
    alone = torch.cat([model(tokens[i : i + 1]) for i in range(3)])
    assert torch.allclose(model(tokens), alone, atol=1e-4)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of one head, (..., time, width)."""
    time, width = x.shape[-2:]
    q, _, _ = split_rotated(x.reshape(-1, time, 1, width).expand(-1, time, 3, width), 1, 1)
    return q.reshape(x.shape)


def naive_attention(model: GPT, x: Tensor) -> Tensor:
    """The first block's attention, written out head by head."""
    attention: Any = model.blocks[0].attention
    time, width = x.shape[1], attention.head_width
    q, k, v = attention.qkv(x).split([n * width for n in (attention.heads, attention.kv_heads, attention.kv_heads)], 2)
    out = []
    for head in range(attention.heads):
        shared = head * attention.kv_heads // attention.heads
        one_q = q[..., head * width : (head + 1) * width]
        one_k, one_v = (t[..., shared * width : (shared + 1) * width] for t in (k, v))
        if attention.rotary:
            one_q, one_k = rotate(one_q), rotate(one_k)
        scores = one_q @ one_k.transpose(1, 2) / math.sqrt(width)
        scores = scores.masked_fill(torch.ones(time, time).triu(1).bool(), -math.inf)
        out.append(scores.softmax(-1) @ one_v)
    result: Tensor = attention.out(torch.cat(out, dim=-1))
    return result


@pytest.mark.parametrize("name", FLAVOURS)
def test_attention_equals_one_written_out_head_by_head(name):
    model = small(name)
    x = torch.randn(2, 12, 32)
    attention: Any = model.blocks[0].attention
    assert torch.allclose(attention(x), naive_attention(model, x), atol=1e-3)


def test_fewer_key_heads_make_a_smaller_model():
    shared, full = (small(name) for name in ("llama with two heads for four", "llama"))
    saved = 2 * 2 * 2 * 8 * 32  # blocks, keys and values, heads saved, head width, width
    assert sum(p.numel() for p in full.parameters()) - sum(p.numel() for p in shared.parameters()) == saved


def test_tied_weights_are_one_parameter_and_untied_are_two():
    tied, untied = small("gpt2"), small("untied")
    assert tied.head.weight is tied.embedding.weight
    names = [name for name, _ in tied.named_parameters()]
    assert "embedding.weight" in names and "head.weight" not in names
    assert untied.head.weight is not untied.embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 50 * 32
    gpt_loss(tied, torch.randint(50, (2, 8))).mean().backward()
    assert tied.embedding.weight.grad is not None
    assert bool((tied.embedding.weight.grad != 0).any(dim=1).all())  # as the head it is used for every word


def test_a_llama_has_no_biases_and_a_gpt2_has():
    assert not any(name.endswith("bias") for name, _ in small("llama").named_parameters())
    assert any(name.endswith("qkv.bias") for name, _ in small("gpt2").named_parameters())


@pytest.mark.parametrize(
    "options", [{"width": 30}, {"kv_heads": 3}, {"heads": 64}, {"flavour": "llama", "width": 12, "heads": 4}]
)
def test_heads_that_do_not_divide_are_refused(options):
    settings: dict[str, Any] = {"flavour": "gpt2", "blocks": 1, "width": 32, "heads": 4, "vocabulary": 10}
    with pytest.raises(ModelError, match="heads"):
        GPT(GPTConfig(**(settings | options)))


def test_what_writes_into_the_residual_stream_starts_smaller():
    torch.manual_seed(0)
    model = GPT(GPTConfig("gpt2", 8, 256, 4, vocabulary=300, context=64))
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}
    for name, std in stds.items():
        wanted = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
        assert std == pytest.approx(wanted, rel=0.05), name
    assert all(bool((p == 0).all()) for name, p in model.named_parameters() if name.endswith("bias"))


def test_an_untrained_model_knows_nothing():
    torch.manual_seed(0)
    loss = gpt_loss(tiny_gpt(), torch.randint(256, (8, CONTEXT + 1))).mean()
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_loss_of_a_sequence_is_its_mean_next_token_loss(name):
    model = small(name)
    tokens = torch.randint(50, (3, 13))
    losses = gpt_loss(model, tokens)
    chances = model(tokens[:, :-1]).log_softmax(-1)
    expected = [-sum(chances[i, t, tokens[i, t + 1]] for t in range(12)) / 12 for i in range(3)]
    assert torch.allclose(losses, torch.stack([torch.as_tensor(e) for e in expected]), atol=1e-4)
    assert torch.allclose(losses.mean(), F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


def test_dropout_is_random_in_training_and_absent_in_evaluation():
    model = small("gpt2", dropout=0.5)
    tokens = torch.randint(50, (2, 12))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert torch.allclose(model(tokens), small("gpt2")(tokens))


def test_rotation_keeps_lengths_and_makes_products_depend_on_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = rotate(q.expand(20, 8)), rotate(k.expand(20, 8))
    assert torch.equal(turned_q[0], q)
    assert torch.allclose(turned_q.norm(dim=1), q.norm().expand(20), atol=1e-5)
    products = turned_q @ turned_k.t()
    for distance in (-3, 0, 1, 7):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
    assert not torch.isclose(products[0, 0], products[0, 7], atol=1e-3)


@pytest.mark.parametrize("name", ["nano", "nano-llama"])
def test_nano_learns_python_in_thirty_steps(name):
    torch.manual_seed(0)
    model = build_gpt(name, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in take(PositionedLoader(text_splits().train, 8, seed=0), 30):
        loss = gpt_loss(model, batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
