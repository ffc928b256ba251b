"""The kernel and the reference say the same of any ring, full or not."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.device import DEVICE
from tests.kernels.test_feature_reference import ring

from hybridtrainer.kernels import feature_reference
from hybridtrainer.kernels.features import features

pytest.importorskip("triton")


@pytest.mark.parametrize("count", [1, 2, 5, 63, 256, 700])
def test_the_kernel_equals_the_reference_however_much_is_known(count):
    rows = ring(count).to(DEVICE)
    by_kernel = features(rows, count, use_triton=True)
    torch.testing.assert_close(by_kernel, feature_reference.features(rows, count), rtol=2e-4, atol=2e-3)


def test_equal_losses_have_ranks_too():
    rows = ring(300)
    rows[:, 0] = torch.tensor([1.0, 2.0, 2.0, 3.0]).repeat(64)
    rows = rows.to(DEVICE)
    by_kernel = features(rows, 300, use_triton=True)
    torch.testing.assert_close(by_kernel, feature_reference.features(rows, 300), rtol=2e-4, atol=2e-3)


def test_what_was_overwritten_long_ago_is_not_seen_before_the_ring_is_full():
    rows = ring(40).to(DEVICE)
    clean = features(rows, 40, use_triton=True)
    rows[40:] = float("nan")
    assert torch.equal(features(rows, 40, use_triton=True), clean)
