"""Frozen layers in few bits: adapters learn on them, and what is trained, tied or shared is left or handled."""

from __future__ import annotations

import pytest
import torch
from tests.memory.support import build
from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.frozen import quantize_frozen
from hybridtrainer.memory.int8 import Int8Linear
from hybridtrainer.memory.nf4 import Nf4Linear


class Adapted(nn.Module):
    """A frozen layer with a trainable detour of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(nn.Linear(64, 128)), nn.GELU(), Adapted(nn.Linear(128, 64)))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("bits", "saved", "close"), [(8, 0.7 * 4, 0.02), (4, 4 - 4.5 / 8, 0.1)])
def test_adapters_learn_on_a_frozen_base_of_few_bits(bits, saved, close, autocast):
    torch.manual_seed(1)
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    losses = []
    for quantized in (False, True):
        model = adapted()
        if quantized:
            assert quantize_frozen(model, bits) >= saved * 2 * 64 * 128
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(30):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = (model(x).float() - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=close)
    assert losses[1] < 0.9 * y.square().mean().item()


def test_rows_of_no_whole_blocks_take_8_bits_and_other_numbers_of_bits_are_refused():
    net = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 64)).requires_grad_(False)
    quantize_frozen(net, bits=4)
    assert isinstance(net[0], Int8Linear)
    assert isinstance(net[1], Nf4Linear)
    with pytest.raises(ModelError, match="3 bits"):
        quantize_frozen(net, bits=3)  # type: ignore[arg-type]


def test_the_transposed_layers_of_gpt2_are_taken_too():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    layer = transformers.pytorch_utils.Conv1D(96, 64).requires_grad_(False)
    layer.bias.data.normal_()
    net, x = nn.Sequential(layer), torch.randn(5, 64)
    expected = net(x)
    quantize_frozen(net)
    assert isinstance(net[0], Int8Linear)
    assert torch.allclose(net(x), expected, atol=1e-2)


def test_what_is_trained_tied_or_shared_is_handled():
    model = build()
    model.requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    quantize_frozen(model)
    assert type(model.head) is nn.Linear  # tied to the embedding
    assert type(model.get_submodule("blocks.0.mlp.up")) is nn.Linear
    assert isinstance(model.get_submodule("blocks.1.mlp.up"), Int8Linear)
    shared = nn.Linear(64, 64).requires_grad_(False)
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    quantize_frozen(twice)
    assert twice[0] is twice[2] and isinstance(twice[0], Int8Linear)
    assert quantize_frozen(twice) == 0
