from __future__ import annotations

import pytest
import torch
from tests.kernels.device import DEVICE

from hybridtrainer.bench.kernels import describe, measure_kernels
from hybridtrainer.predict.rssm import Size

pytest.importorskip("triton")


@pytest.mark.slow
def test_every_kernel_agrees_with_its_reference_and_is_timed():
    rows = measure_kernels(torch.device(DEVICE), calls=1, rounds=1, width=64, size=Size(16, 4, 1))
    assert [row["kernel"] for row in rows] == [
        "features", "rollout", "swiglu", "rotary", "update split8", "update sr4", "update factored",
        "pack", "unpack",
    ]  # fmt: skip
    for row in rows:
        assert row["largest_difference"] < 0.02, row["kernel"]  # a last bit of bf16, rounded at random
        assert row["microseconds"] > 0 and row["reference_microseconds"] > 0
    assert [row["kernel"] for row in rows if row["cpu_microseconds"] is not None] == ["features", "rollout"]
    assert len(describe(rows).splitlines()) == len(rows) + 1
