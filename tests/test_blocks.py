"""The repeated blocks of a decoder are found by their structure, and what cannot come and go is refused."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from hybridtrainer.blocks import find_blocks
from hybridtrainer.errors import ModelError
from hybridtrainer.memory.offload import offload_blocks
from hybridtrainer.memory.recompute import recompute_blocks
from hybridtrainer.models.gpt import GPT_CONFIGS, build_gpt


class Layer(nn.Module):
    def __init__(self, width: int = 8, extra: bool = False) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, width))
        self.norm = nn.LayerNorm(width)
        self.extra = nn.Linear(width, width) if extra else None


class OtherLayer(Layer):
    pass


class Decoder(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 50, bias=False)


@pytest.mark.parametrize("name", GPT_CONFIGS)
def test_the_blocks_of_every_named_model_are_found_without_memory(name):
    model = build_gpt(name, device="meta")
    blocks = find_blocks(model)
    assert blocks.path == "blocks"
    assert blocks.modules == tuple(model.blocks)
    config = GPT_CONFIGS[name]
    positions = ["positions.weight"] if config.flavour == "gpt2" else []
    norm = ["norm.weight", "norm.bias"] if config.flavour == "gpt2" else ["norm.weight"]
    head = [] if config.tied else ["head.weight"]
    assert list(blocks.rest) == ["embedding.weight", *positions, *norm, *head]


@pytest.mark.parametrize("name", ["nano", "nano-llama"])
def test_blocks_and_rest_are_all_parameters_once(name):
    model = build_gpt(name)
    blocks = find_blocks(model)
    inside = [parameter for block in blocks.modules for parameter in block.parameters()]
    found = [*inside, *(model.get_parameter(name) for name in blocks.rest)]
    assert len(found) == len(set(found))
    assert set(found) == set(model.parameters())


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 60}  # fmt: skip
HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("transformer.h", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 60}),
    "LlamaForCausalLM": ("model.layers", SMALL),
    "Qwen2ForCausalLM": ("model.layers", SMALL),
    "MistralForCausalLM": ("model.layers", SMALL),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_the_blocks_of_hugging_face_decoders_are_found(name, tied, device):
    transformers = pytest.importorskip("transformers")
    path, settings = HUGGING_FACE[name]
    kind = getattr(transformers, name)
    with torch.device(device):
        model = kind(kind.config_class(**settings, tie_word_embeddings=tied))
    blocks = find_blocks(model)
    assert blocks.path == path
    assert blocks.modules == tuple(model.get_submodule(path))
    assert len(blocks.modules) == 3
    outside = [name for name, _ in model.named_parameters() if not name.startswith(f"{path}.")]
    assert list(blocks.rest) == outside
    assert ("lm_head.weight" in outside) == (not tied)


def test_a_hugging_face_decoder_whose_first_layer_is_dense_is_refused_by_name():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2MoeConfig(
        **SMALL, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, mlp_only_layers=[0]
    )
    with pytest.raises(ModelError, match=r"model\.layers are not alike: mlp\.\S+ is in block 0 and not in block 1"):
        find_blocks(transformers.Qwen2MoeForCausalLM(config))


def test_a_list_inside_the_blocks_does_not_count_against_them():
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Layer() for _ in range(6))

    assert find_blocks(Decoder(Sparse(), Sparse())).path == "layers"
    with pytest.raises(ModelError, match="block 0 is a Layer and block 1 a Sparse"):
        find_blocks(Decoder(Layer(), Sparse(), Layer(), Sparse()))


def test_the_stack_with_the_most_parameters_is_taken():
    model = nn.ModuleDict({"small": nn.ModuleList([Layer(), Layer()]), "large": nn.ModuleList([Layer(), Layer()])})
    assert find_blocks(model).path == "small"  # the first of two that are equal
    model["large"].extend([Layer()])  # type: ignore[operator]
    blocks = find_blocks(model)
    assert blocks.path == "large"
    assert all(name.startswith("small.") for name in blocks.rest)
    assert len(blocks.rest) == 12


@pytest.mark.parametrize(
    "container", [nn.Sequential, lambda *layers: nn.ModuleList(layers)], ids=["sequential", "list"]
)
def test_the_model_itself_can_be_the_stack(container):
    model = container(Layer(), Layer(), Layer())
    blocks = find_blocks(model)
    assert (blocks.path, blocks.modules, blocks.rest) == ("", tuple(model), ())


def test_a_sequential_of_embedding_blocks_and_head_is_looked_into():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Layer(), Layer()), nn.Linear(8, 8))
    assert find_blocks(model).path == "1"


def test_a_list_of_lists_is_no_stack_of_its_own():
    model = nn.ModuleList([nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer(), Layer()])])
    assert find_blocks(model).path == "0"


def test_frozen_parameters_and_a_second_name_of_the_stack_are_allowed():
    model = Decoder(Layer(), Layer())
    model.layers[1].norm.weight.requires_grad_(False)  # type: ignore[union-attr]
    model.alias = model.layers
    model.aaa = nn.ModuleDict({"again": model.layers})
    assert find_blocks(model).rest == ("embedding.weight", "head.weight")


def test_a_parameter_of_the_list_itself_belongs_to_the_rest():
    model = Decoder(Layer(), Layer())
    model.layers.register_parameter("gate", nn.Parameter(torch.zeros(2)))
    assert find_blocks(model).rest == ("embedding.weight", "layers.gate", "head.weight")


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        Decoder(),
        Decoder(nn.Linear(8, 8)),
        Decoder(nn.Dropout(), nn.Dropout()),
        nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)),
    ],
    ids=["one module", "empty list", "one block", "no parameters", "nothing repeated"],
)
def test_a_model_without_repeated_blocks_is_refused(model):
    with pytest.raises(ModelError, match=r"No repeated blocks were found in \w+\. Put the blocks .*nn\.ModuleList"):
        find_blocks(model)


def with_norm(norm: nn.Module) -> nn.Module:
    layer = Layer()
    layer.norm = norm  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (OtherLayer(), "block 0 is a Layer and block 2 a OtherLayer"),
        (Layer(extra=True), r"extra\.weight is in block 2 and not in block 0"),
        (with_norm(nn.RMSNorm(8)), r"norm\.bias is in block 0 and not in block 2"),
        (Layer(width=6), r"mlp\.0\.weight is \(16, 8\) of torch\.float32 in block 0 and \(16, 6\)"),
        (Layer().bfloat16(), r"mlp\.0\.weight is .*float32 in block 0 and .*bfloat16 in block 2"),
    ],
    ids=["class", "more parameters", "fewer parameters", "shape", "type"],
)
def test_blocks_that_differ_are_refused_with_the_first_difference(other, difference):
    with pytest.raises(ModelError, match=rf"The blocks of layers are not alike: {difference}.* Give every block"):
        find_blocks(Decoder(Layer(), Layer(), other, Layer(extra=True)))


def test_blocks_that_share_parameters_are_refused():
    same = Layer()
    with pytest.raises(ModelError, match=r"Blocks 0 and 1 of layers share a parameter .*of its own"):
        find_blocks(Decoder(same, same))
    one, two = Layer(), Layer()
    two.mlp[2].weight = one.mlp[2].weight
    with pytest.raises(ModelError, match=r"Blocks 1 and 2 .*\(mlp\.2\.weight, mlp\.2\.weight\)"):
        find_blocks(Decoder(Layer(), one, two))


def test_a_parameter_that_a_block_shares_with_the_rest_is_refused():
    model = Decoder(Layer(), Layer(extra=False))
    model.norm = nn.LayerNorm(8)
    model.norm.weight = model.layers[1].norm.weight  # type: ignore[union-attr, assignment]
    with pytest.raises(ModelError, match=r"Block 1 of layers shares norm\.weight with the rest"):
        find_blocks(model)
    model = Decoder(Layer(), Layer())
    model.first = model.layers[0]
    with pytest.raises(ModelError, match=r"Block 0 of layers shares first\.\S+ with the rest"):
        find_blocks(model)


def test_running_statistics_in_a_block_are_refused_and_elsewhere_allowed():
    with pytest.raises(ModelError, match=r"Block 0 of layers keeps running statistics \(norm, a BatchNorm1d\).*LayerN"):
        find_blocks(Decoder(with_norm(nn.BatchNorm1d(8)), with_norm(nn.BatchNorm1d(8))))
    without = [with_norm(nn.BatchNorm1d(8, track_running_stats=False)) for _ in range(2)]
    assert len(find_blocks(Decoder(*without)).modules) == 2
    model = Decoder(Layer(), Layer())
    model.norm = nn.BatchNorm1d(8)
    assert "norm.weight" in find_blocks(model).rest


@pytest.mark.parametrize("way", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
@pytest.mark.parametrize("arrange", [lambda model: recompute_blocks(model, 2), offload_blocks])
def test_a_copy_is_without_what_stands_around_the_blocks_and_computes_with_its_own(way, arrange):
    torch.manual_seed(0)
    model = build_gpt("nano")
    tokens = torch.arange(8)[None]
    expected = model(tokens)
    arrange(model)
    assert torch.equal(model(tokens), expected)
    twin = way(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(tokens), expected)
    recompute_blocks(twin, 2)
    offload_blocks(twin)
    assert torch.equal(twin(tokens), expected)
