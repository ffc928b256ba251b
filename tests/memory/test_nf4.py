"""Frozen matrices in 4 bits: how near the codes are, what they take, and that adapters learn on them."""

from __future__ import annotations

import pytest
import torch
from tests.memory.test_int8 import adapted
from torch import nn

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.int8 import Int8Linear, int8_matrices, quantize_frozen
from hybridtrainer.memory.nf4 import BLOCK, Nf4Linear, Nf4Matrix, table
from hybridtrainer.memory.parking import Parking
from hybridtrainer.weights import HostCopy


def test_the_table_is_the_published_one():
    values = table().tolist()
    assert values == sorted(values)
    assert (values[0], values[7], values[15]) == (-1.0, 0.0, 1.0)
    assert values[1] == pytest.approx(-0.6961928, abs=2e-6)  # arXiv:2305.14314, appendix E
    assert values[14] == pytest.approx(0.7229568, abs=2e-6)


def test_each_weight_gets_the_nearest_value_of_its_block():
    torch.manual_seed(0)
    matrix = torch.randn(8, 3 * BLOCK)
    read = Nf4Matrix.of(matrix).read()
    scales = matrix.view(8, 3, BLOCK).abs().amax(2, keepdim=True)
    values = table() * scales[..., None]
    nearest = (matrix.view(8, 3, BLOCK, 1) - values).abs().amin(3)
    assert torch.allclose((matrix - read).view(8, 3, BLOCK).abs(), nearest, atol=1e-6)


def test_a_matrix_of_table_values_comes_back_exactly_and_zeros_stay_zero():
    matrix = table()[torch.arange(BLOCK) % 16].repeat(4, 2)
    assert torch.equal(Nf4Matrix.of(matrix).read(), matrix)
    assert not Nf4Matrix.of(torch.zeros(2, BLOCK)).read().any()


def test_a_weight_takes_four_and_a_half_bits():
    assert Nf4Matrix.of(torch.randn(64, 256)).nbytes == 64 * 256 * 4.5 / 8


def test_gradients_are_those_of_the_matrix_it_stands_for():
    torch.manual_seed(0)
    layer = Nf4Linear(nn.Linear(64, 32).requires_grad_(False))
    layer.bias.requires_grad_(True)
    x = torch.randn(3, 5, 64, requires_grad=True)
    out = layer(x)
    ours = torch.autograd.grad(out.square().sum(), [x, layer.bias])
    plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
    theirs = torch.autograd.grad(plain.square().sum(), [x, layer.bias])
    assert torch.equal(out, plain)
    assert all(torch.allclose(mine, other, rtol=1e-5, atol=1e-5) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_learn_on_a_frozen_base_of_4_bits(autocast):
    torch.manual_seed(1)
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    model = adapted()
    assert quantize_frozen(model, bits=4) == 2 * 64 * 128 * (4 - 4.5 / 8)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(30):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (model(x).float() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


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


def test_a_probe_in_8_bits_leaves_it_as_it_is():
    layer = Nf4Linear(nn.Linear(1024, 1024).requires_grad_(False))
    net, x = nn.Sequential(layer), torch.randn(2, 1024)
    expected = net(x)
    with int8_matrices(net, HostCopy(), Parking(lambda _: True, hollow=True)) as coded_bytes:
        assert coded_bytes == 0
        assert torch.equal(net(x), expected)
