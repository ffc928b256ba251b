"""A layer of codes computes with the matrix that they stand for, whichever codes they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.coded_linear import CodedLinear
from hybridtrainer.memory.int8 import Int8Linear, int8_matrices
from hybridtrainer.memory.nf4 import Nf4Linear
from hybridtrainer.memory.parking import Parking
from hybridtrainer.weights import HostCopy

KINDS: list[type[CodedLinear]] = [Int8Linear, Nf4Linear]


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_the_matrix_it_stands_for(kind):
    torch.manual_seed(0)
    layer = kind(nn.Linear(64, 32).requires_grad_(False))
    layer.bias.requires_grad_(True)
    x = torch.randn(3, 5, 64, requires_grad=True)
    out = layer(x)
    ours = torch.autograd.grad(out.square().sum(), [x, layer.bias])
    plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
    theirs = torch.autograd.grad(plain.square().sum(), [x, layer.bias])
    assert torch.equal(out, plain)
    assert all(torch.allclose(mine, other, rtol=1e-5, atol=1e-5) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_in_8_bits_does_not_code_it_again(kind):
    torch.manual_seed(0)
    layer = kind(nn.Linear(1024, 1024).requires_grad_(False))
    assert layer.scales.numel() >= 4096
    net, x = nn.Sequential(layer), torch.randn(2, 1024)
    expected = net(x)
    with int8_matrices(net, HostCopy(), Parking(lambda _: True, hollow=True)) as coded_bytes:
        assert coded_bytes == 0
        assert torch.equal(net(x), expected)


def test_a_bias_that_is_not_there_stays_away():
    layer = Int8Linear(nn.Linear(64, 32, bias=False).requires_grad_(False))
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))
    assert layer.extra_repr() == "in_features=64, out_features=32, bias=False"


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_be_written_into_a_weight_that_nobody_keeps_is_refused(kind):
    layer = kind(nn.Linear(64, 32).requires_grad_(False))
    with pytest.raises(ModelError, match="merge there"):
        layer.weight.data += 1
    with pytest.raises(ModelError, match="merge there"):
        layer.weight.data = torch.zeros(32, 64)
    assert type(layer.weight * 2) is torch.Tensor
