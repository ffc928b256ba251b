from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.kernels.device import DEVICE

from hybridtrainer.kernels.rollout import Cell, gru, parts_for, probabilities, rollout, rollout_reference


def cell(members: int, d: int, z: int, seed: int = 0) -> Cell:
    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(members, *shape, generator=generator) / shape[0] ** 0.5
        return drawn.to(DEVICE)

    return Cell(
        weights(z, 3 * d), weights(1, 3 * d), weights(d, 3 * d), weights(1, 3 * d), weights(d, z), weights(1, z)
    )


def start(members: int, d: int, z: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(members, d, generator=generator).tanh()
    return h.to(DEVICE), probabilities(torch.randn(members, z, generator=generator), 8).to(DEVICE)


@pytest.mark.parametrize(("members", "d", "categoricals", "ticks"), [(3, 256, 32, 2), (1, 16, 4, 7), (2, 64, 8, 10)])
def test_the_kernel_equals_the_reference(members, d, categoricals, ticks):
    pytest.importorskip("triton")
    weights, (h, z) = cell(members, d, 8 * categoricals), start(members, d, 8 * categoricals)
    by_kernel = rollout(weights, h, z, ticks, 8, use_triton=True)
    assert by_kernel.shape == (members, ticks, d + 8 * categoricals)
    torch.testing.assert_close(by_kernel, rollout_reference(weights, h, z, ticks, 8), rtol=1e-4, atol=1e-5)


def test_programs_that_share_a_member_wait_for_each_other():
    pytest.importorskip("triton")
    weights, (h, z) = cell(3, 64, 64), start(3, 64, 64)
    first = rollout(weights, h, z, 10, 8, use_triton=True)
    for _ in range(100 if DEVICE == "cuda" else 1):
        assert torch.equal(rollout(weights, h, z, 10, 8, use_triton=True), first)


def test_as_many_programs_as_run_at_once_share_a_member(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=20))
    gpu = torch.device("cuda")
    assert [parts_for(gpu, members, 32) for members in (1, 2, 3, 5, 20, 40)] == [16, 8, 4, 4, 1, 1]
    assert parts_for(gpu, 1, 4) == 4
    assert parts_for(torch.device("cpu"), 1, 32) == 1


def test_a_tick_is_torchs_own_gated_recurrent_unit():
    weights, (h, z) = cell(1, 16, 32), start(1, 16, 32)
    theirs = torch.nn.GRUCell(32, 16, device=DEVICE)
    with torch.no_grad():
        theirs.weight_ih.copy_(weights.input[0].T)
        theirs.bias_ih.copy_(weights.input_bias[0, 0])
        theirs.weight_hh.copy_(weights.hidden[0].T)
        theirs.bias_hh.copy_(weights.hidden_bias[0, 0])
        torch.testing.assert_close(gru(weights, z[:, None], h[:, None])[:, 0], theirs(z, h), rtol=1e-5, atol=1e-6)


def test_members_do_not_see_each_other():
    weights, (h, z) = cell(2, 16, 32), start(2, 16, 32)
    both = rollout(weights, h, z, 3, 8)
    alone = rollout(Cell(*(part[1:] for part in weights)), h[1:], z[1:], 3, 8)
    torch.testing.assert_close(both[1:], alone)


def test_each_categorical_adds_up_to_one_and_no_class_is_impossible():
    chances = probabilities(torch.tensor([[100.0, 0, 0, 0, 0, 0, 0, 0] * 2]), 8).view(2, 8)
    torch.testing.assert_close(chances.sum(1), torch.ones(2))
    assert chances.min() > 0.001
