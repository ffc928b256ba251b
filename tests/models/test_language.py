"""The loss without whole logits equals the model's own, and models it would be wrong for are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss
from hybridtrainer.models.language import language_loss

VOCABULARY = 60
TOKENS = torch.randint(VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(0))


def our_model(flavour: Any, tied: bool) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(flavour, blocks=2, width=32, heads=4, vocabulary=VOCABULARY, context=16, tied=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # at its initial size every token is about as likely
    return model


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": VOCABULARY, "initializer_range": 0.1, "pad_token_id": 0}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "initializer_range": 0.1,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
OPT = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
       "vocab_size": VOCABULARY, "init_std": 0.1, "dropout": 0.0}  # fmt: skip
PHI = SMALL | {"num_key_value_heads": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": SMALL,
    "Qwen2ForCausalLM": SMALL,
    "MistralForCausalLM": SMALL,
    "GemmaForCausalLM": SMALL | {"head_dim": 8},
    "OPTForCausalLM": OPT,  # the decoder lies two levels down
    "PhiForCausalLM": PHI,  # the head has a bias
}


def hugging_face(name: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**(HUGGING_FACE.get(name, SMALL) | options)))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("flavour", ["gpt2", "llama"])
def test_the_loss_of_our_decoders_equals_the_plain_one(flavour, tied):
    model = our_model(flavour, tied)
    tiled, plain = language_loss(model, TOKENS, tile_tokens=10), gpt_loss(model, TOKENS)
    assert tiled.shape == (3,)
    torch.testing.assert_close(tiled, plain, rtol=1e-5, atol=1e-5)
    assert plain.std() > 0.01  # sequences differ, so that their order is seen
    weights = torch.tensor([1.0, -2.0, 0.5])
    assert_same(gradients(model, tiled @ weights), gradients(model, plain @ weights))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_the_loss_of_hugging_face_decoders_equals_their_own(name, tied):
    model = hugging_face(name, tie_word_embeddings=tied).train()
    tiled = language_loss(model, TOKENS, tile_tokens=10)
    own = model(input_ids=TOKENS, labels=TOKENS).loss
    torch.testing.assert_close(tiled.mean(), own, rtol=1e-5, atol=1e-5)
    each = torch.stack([model(input_ids=one[None], labels=one[None]).loss for one in TOKENS])
    torch.testing.assert_close(tiled, each, rtol=1e-5, atol=1e-5)
    of_tiled, of_own = gradients(model, tiled.mean()), gradients(model, own)
    assert_same(of_tiled, of_own)
    assert len(of_tiled) == len(list(model.parameters()))


def test_the_split_of_forward_leaves_its_result_as_it_was():
    model = our_model("gpt2", True)
    x = model.embedding(TOKENS) + model.positions.weight[:13]  # type: ignore[union-attr]
    for block in model.blocks:
        x = block(x)
    assert torch.equal(model(TOKENS), model.head(model.norm(x)))
    assert torch.equal(model.hidden(TOKENS), model.norm(x))


def test_padding_after_the_end_changes_nothing():
    model = our_model("llama", False)
    padded = torch.cat([TOKENS, torch.full((3, 2), -100)], dim=1)
    torch.testing.assert_close(language_loss(model, padded), language_loss(model, TOKENS))
    padded[1, 4:] = -100
    short = language_loss(model, TOKENS[1:2, :4])
    torch.testing.assert_close(language_loss(model, padded)[1:2], short)
    padded[1] = -100
    assert language_loss(model, padded)[1] == 0


def test_a_token_that_is_ignored_is_still_read_where_it_is_one_of_the_vocabulary():
    model = our_model("llama", False)
    token = int(TOKENS[0, 5])
    logits = model(TOKENS[:, :-1]).flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, TOKENS[:, 1:].flatten(), ignore_index=token, reduction="none")
    counted = (TOKENS[:, 1:] != token).sum(1)
    torch.testing.assert_close(language_loss(model, TOKENS, ignore_index=token), losses.view(3, -1).sum(1) / counted)


def test_smoothing_reaches_the_loss():
    model = our_model("gpt2", True)
    logits = model(TOKENS[:, :-1]).flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, TOKENS[:, 1:].flatten(), label_smoothing=0.2)
    torch.testing.assert_close(language_loss(model, TOKENS, label_smoothing=0.2).mean(), expected)


REFUSED = [
    ("Gemma2ForCausalLM", {"head_dim": 8}, "final_logit_softcapping = 30.0"),
    ("CohereForCausalLM", {}, "logit_scale = 0.0625"),
    ("GraniteForCausalLM", {"logits_scaling": 8.0}, "logits_scaling = 8.0"),
    ("LlamaModel", {}, "LlamaModel has no decoder apart from itself"),
    ("BertLMHeadModel", {"is_decoder": True}, r"cls\.predictions\.\S+ .* neither in its decoder nor in its head"),
    ("T5ForConditionalGeneration", {}, "an encoder with a decoder"),
    ("MixtralForCausalLM", {"output_router_logits": True}, "a loss of its router"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_hugging_face_models_whose_loss_would_be_wrong_are_refused(name, options, message):
    model = hugging_face(name, **options)
    with pytest.raises(ModelError, match=message):
        language_loss(model, TOKENS)


@pytest.mark.parametrize(
    ("name", "options"),
    [("Gemma2ForCausalLM", {"head_dim": 8, "final_logit_softcapping": None}), ("GraniteForCausalLM", {})],
    ids=["no cap", "scale 1"],
)
def test_a_setting_that_changes_nothing_is_no_reason_to_refuse(name, options):
    model = hugging_face(name, **options)
    own = model(input_ids=TOKENS, labels=TOKENS).loss
    torch.testing.assert_close(language_loss(model, TOKENS).mean(), own, rtol=1e-5, atol=1e-5)


def test_a_head_that_is_more_than_a_matrix_is_refused():
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = hugging_face("LlamaForCausalLM")
    model.lm_head = Scaled(32, VOCABULARY, bias=False)
    with pytest.raises(ModelError, match="head of LlamaForCausalLM is a Scaled"):
        language_loss(model, TOKENS)


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.Sequential(our_model("gpt2", True))], ids=["other", "wrapped"])
def test_any_other_model_is_refused_with_what_to_do(model):
    with pytest.raises(ModelError, match=r"does not know how \w+ computes its logits\..*head_loss"):
        language_loss(model, TOKENS)
