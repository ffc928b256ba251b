"""What a GPU's reductions take for the while: much for long sums side by side, nothing for short or few ones."""

from __future__ import annotations

import pytest
import torch

from hybridtrainer.planning.scratch import reduction_bytes

MIB = 1 << 20


def tokens(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("rows", "columns", "mib"),
    [
        (4096, 4096, 128),  # as an H200 took for the bias of the 350M's wide layer
        (4096, 1024, 32),
        (1024, 4096, 32),
        (512, 4096, 0),  # a thread sums 128 values by itself
        (16384, 3072, 132),  # more blocks than run at a time are not made
        (1 << 20, 3072, 1536),  # unless a thread would have to sum more than 256 values
        (4096, 1 << 20, 0),  # enough outputs to keep all of them busy
    ],
)
def test_sums_over_all_tokens(rows, columns, mib):
    assert reduction_bytes(tokens(rows, columns), [0]) == mib * MIB
    assert reduction_bytes(tokens(4, rows // 4, columns), [0, 1]) == mib * MIB
    assert reduction_bytes(tokens(rows, columns).float(), [-2]) == mib * MIB


def test_a_width_of_no_four_outputs_is_summed_by_more_threads_each_with_one():
    assert reduction_bytes(tokens(4096, 1023), [0]) == 4 * 1023 * 16 * 32


def test_values_that_lie_side_by_side_and_sums_of_everything_take_next_to_nothing():
    assert reduction_bytes(tokens(4096, 4096), [1]) == 0
    assert reduction_bytes(tokens(4096, 4096).t(), [0]) == 0
    assert reduction_bytes(tokens(4096, 4096).t(), [1]) == 128 * MIB
    assert reduction_bytes(tokens(4096, 4096), None) == reduction_bytes(tokens(4096, 4096), []) == 0
    assert reduction_bytes(tokens(1, 4096), [0]) == reduction_bytes(tokens(0, 4096), [0]) == 0
    assert reduction_bytes(torch.empty((), device="meta"), None) == 0
