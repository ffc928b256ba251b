"""The pieces of a step: nothing of the model is allocated or changed, and the sizes are those of its layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.models.gpt import GPT, GPTConfig, build_gpt
from hybridtrainer.planning.pieces import rehearse_pieces, with_mode, without_memory

SMALL = GPTConfig("llama", 3, 64, 4, vocabulary=96, context=32, tied=False)


def test_the_model_is_left_as_it_was():
    model = GPT(SMALL)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rehearse_pieces(model, "split8", 4, 32, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.blocks[0]._forward_pre_hooks


def test_a_copy_without_memory_has_the_shape_and_the_ties_of_the_model():
    model = GPT(GPTConfig("gpt2", 2, 64, 4, vocabulary=96, context=32))
    copy = without_memory(model, torch.bfloat16)
    assert [tuple(each.shape) for each in copy.parameters()] == [tuple(each.shape) for each in model.parameters()]
    assert {(each.device.type, each.dtype) for each in copy.parameters()} == {("meta", torch.bfloat16)}
    assert isinstance(copy, GPT)
    assert copy.head.weight is copy.embedding.weight


def test_sizes_are_those_of_the_model():
    pieces = rehearse_pieces(build_gpt("llama-7b", context=2048, device="meta"), "split8", 2, 2048, 1)
    assert len(pieces.layouts) == 32
    assert pieces.hidden_bytes == 2 * 2048 * 4096 * 2
    assert pieces.parameters == 6_738_415_616
    assert pieces.rest_bytes == (2 * 32000 * 4096 + 4096) * 2
    assert pieces.tied_bytes == 0
    # A block's products: 2 flops for each weight and token, and attention.
    block = sum(entry.weight.elements for entry in pieces.layouts[0].entries)
    assert pieces.forward.flops == pytest.approx(2 * block * 4096 + 2 * 2 * 4096 * 2048 * 4096 / 2, rel=0.01)
    assert pieces.backward.flops == pytest.approx(3 * pieces.forward.flops, rel=0.05)


def test_a_head_that_shares_its_weight_keeps_its_gradient():
    tied = rehearse_pieces(GPT(GPTConfig("gpt2", 2, 64, 4, vocabulary=96, context=32)), "split8", 2, 32, 1)
    assert tied.tied_bytes == 96 * 64 * 2


@pytest.mark.parametrize(
    ("precision", "mode", "hidden"), [("bf16", "split8", 4), ("fp32", "sr8", 0), ("bf16", "fp32", 0)]
)
def test_a_last_norm_in_32_bits_takes_more_while_the_head_is_computed(precision, mode, hidden):
    found = rehearse_pieces(GPT(SMALL), mode, 4, 32, 1, precision=precision)
    assert found.widened_bytes == hidden * found.hidden_bytes
    plain = rehearse_pieces(GPT(SMALL), mode, 4, 32, 1)
    assert (found.backward.peak_bytes > plain.backward.peak_bytes) == (hidden > 0)


def test_finer_parts_take_less():
    model = build_gpt("gpt2-124m", context=512, device="meta")
    whole, parts = (rehearse_pieces(model, "split8", 8, 512, split) for split in (1, 8))
    assert parts.backward.peak_bytes < 0.6 * whole.backward.peak_bytes


def test_another_mode_changes_what_is_kept_and_nothing_else():
    model = GPT(SMALL)
    eight = rehearse_pieces(model, "split8", 4, 32, 1)
    four = with_mode(eight, model, "sr4")
    again = rehearse_pieces(model, "sr4", 4, 32, 1)
    assert [layout.state_bytes for layout in four.layouts] == [layout.state_bytes for layout in again.layouts]
    assert four.layouts[0].state_bytes < eight.layouts[0].state_bytes
    assert (four.backward, four.head) == (again.backward, again.head)


class Blockless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.embedding(tokens)
        return out


class Images(nn.Module):
    """Takes no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        raise TypeError("images only")


@pytest.mark.parametrize("model", [Blockless(), Images()])
def test_models_that_are_no_decoders_are_refused(model):
    with pytest.raises(ModelError):
        rehearse_pieces(model, "split8", 2, 8, 1)


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen2Config", "GPT2Config", "MistralConfig"])
def test_decoders_of_hugging_face_are_rehearsed(kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind != "GPT2Config":
        sizes["num_key_value_heads"] = 2
    config = getattr(transformers, kind)(**sizes, vocab_size=96)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    pieces = rehearse_pieces(model, "split8", 2, 16, 1)
    assert len(pieces.layouts) == 2
    assert pieces.tied_bytes == (96 * 64 * 2 if kind == "GPT2Config" else 0)
    assert pieces.hidden_bytes == 2 * 16 * 64 * 2
    assert pieces.backward.flops > 2 * pieces.forward.flops > 0
