"""Matrices in 8 bits: near enough to measure with, gone without a trace, and good enough to build on."""

from __future__ import annotations

import pytest
import torch
from tests.memory.support import LLAMA, batches, build, train
from tests.support import assert_same_tensors, parameters_of
from torch import Tensor, nn

from hybridtrainer.memory.int8 import Int8Matrix, int8_matrices
from hybridtrainer.memory.parking import Parking, on_gpu
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.weights import HostCopy


def everything(tensor: Tensor) -> bool:
    return True


def loss_of(model: nn.Module, batch: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float(gpt_loss(model, batch).mean())


@pytest.mark.parametrize("shape", [(3, 256), (5, 768), (7, 65), (2, 1000), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_element_is_off_by_more_than_half_a_step_of_its_block(shape, dtype):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    coded = Int8Matrix.of(matrix)
    block = shape[1] // coded.scales.shape[1]
    assert coded.read().dtype == dtype and coded.read().shape == shape
    allowed = coded.scales.repeat_interleave(block, dim=1) * 0.51 + matrix.abs().float() * 2.0**-8
    assert bool(((coded.read().float() - matrix.float()).abs() <= allowed).all())


def test_a_large_matrix_is_coded_in_pieces_to_the_same_codes(monkeypatch):
    matrix = torch.randn(50, 96)
    whole = Int8Matrix.of(matrix)
    monkeypatch.setattr("hybridtrainer.memory.int8.PIECE_ELEMENTS", 700)
    pieces = Int8Matrix.of(matrix)
    assert torch.equal(whole.codes, pieces.codes) and torch.equal(whole.scales, pieces.scales)


@pytest.mark.parametrize("shape", ["tied", "untied"])
@pytest.mark.parametrize("leaves", [on_gpu, everything], ids=["stays", "leaves"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trained_models_loss_is_within_one_percent_and_every_bit_comes_back(shape, leaves, dtype):
    model = (build() if shape == "tied" else build(LLAMA)).to(dtype)
    train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), batches(10))
    (batch,) = batches(1)
    before, classes = parameters_of(model), [type(module) for module in model.modules()]
    expected = loss_of(model, batch)
    with int8_matrices(model, HostCopy(), Parking(leaves, hollow=True)) as coded_bytes:
        found = loss_of(model, batch)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        small = sum(p.nbytes for p in model.parameters() if p.dim() < 2 or p.numel() < 4096)
    assert found == pytest.approx(expected, rel=0.01)
    assert found != expected
    assert coded_bytes + small < (0.3 if dtype == torch.float32 else 0.6) * whole
    assert_same_tensors(before, parameters_of(model))
    assert [type(module) for module in model.modules()] == classes
    assert loss_of(model, batch) == expected


def test_while_they_are_away_the_full_matrices_are_in_host_memory():
    model, home = build(), HostCopy()
    owned = {parameter: parameter.data_ptr() for parameter in model.parameters() if parameter.numel() >= 4096}
    with int8_matrices(model, home, Parking(everything, hollow=True)):
        assert all(parameter.data_ptr() != before for parameter, before in owned.items())
        assert home.nbytes() >= sum(parameter.nbytes for parameter in owned)
    copies = [copy.untyped_storage() for copy in home._copies.values()]
    slabs = {(slab.data_ptr(), slab.data_ptr() + slab.nbytes()) for slab in copies}
    assert not any(low <= parameter.data_ptr() < high for parameter in owned for low, high in slabs)


def test_an_error_meanwhile_leaves_every_bit():
    model = build()
    before = parameters_of(model)
    with pytest.raises(ZeroDivisionError), int8_matrices(model, HostCopy(), Parking(everything, hollow=True)):
        _ = 1 / 0
    assert_same_tensors(before, parameters_of(model))
    assert type(model.head) is nn.Linear


def test_modules_with_several_matrices_and_those_that_hold_them_themselves_work():
    attention = nn.MultiheadAttention(64, 4, batch_first=True, kdim=64, vdim=96)
    recurrent = nn.LSTM(64, 64, batch_first=True)
    x, values = torch.randn(2, 5, 64), torch.randn(2, 5, 96)
    net = nn.ModuleList([attention, recurrent]).eval()
    with torch.no_grad():
        expected = attention(x, x, values)[0], recurrent(x)[0]
        with int8_matrices(net, HostCopy(), Parking(everything, hollow=True)):
            found = attention(x, x, values)[0], recurrent(x)[0]
    assert torch.allclose(expected[0], found[0], atol=0.02) and not torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])
