"""Codes of 8 bits."""

from __future__ import annotations

import pytest
import torch

from hybridtrainer.kernels.int8 import BLOCK, dequantize, quantize


@pytest.mark.parametrize("block", [BLOCK, 40])
def test_no_value_is_off_by_more_than_half_a_scale(block):
    values = torch.randn(4 * block, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 4 * block)
    codes, scales = quantize(values, block)
    errors = (dequantize(codes, scales) - values).view(-1, block).abs()
    assert len(scales) == 4 and codes.dtype == torch.int8
    assert bool((errors <= 0.5001 * scales[:, None]).all())
    largest = values.view(-1, block).abs().argmax(dim=1, keepdim=True)
    assert bool((errors.gather(1, largest) <= 1e-6 * scales[:, None] * 127).all())


def test_a_short_last_block_is_filled_with_zeros():
    codes, scales = quantize(torch.ones(BLOCK + 3))
    assert len(codes) == 2 * BLOCK and len(scales) == 2
    assert not codes[BLOCK + 3 :].any()
