"""Frozen matrices in 4 bits: how near the codes are, what they take, and that adapters learn on them."""

from __future__ import annotations

import pytest
import torch

from hybridtrainer.memory.nf4 import BLOCK, Nf4Matrix, table


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
