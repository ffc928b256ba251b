"""Buffers remembered and put back."""

from __future__ import annotations

import torch
from tests.support import cnn_setup, tiny_gpt
from torch import nn

from hybridtrainer.buffer_guard import BufferGuard


def test_it_undoes_running_statistics_that_torch_writes_unseen():
    setup = cnn_setup()
    guard = BufferGuard(setup.model)
    setup.model(setup.batches[0][0])
    guard.remember()
    before = {name: buffer.clone() for name, buffer in setup.model.named_buffers()}
    for _ in range(2):  # twice: putting back must not forget
        setup.model(setup.batches[1][0])
        assert not torch.equal(
            before["features.1.running_mean"], dict(setup.model.named_buffers())["features.1.running_mean"]
        )
        guard.put_back()
        for name, buffer in setup.model.named_buffers():
            assert torch.equal(buffer, before[name]), name


def test_it_copies_constants_only_once():
    model = tiny_gpt()
    mask = torch.ones(4, 4)
    model.register_buffer("mask", mask)
    guard = BufferGuard(model)
    guard.remember()
    copies = {key: copy.data_ptr() for key, (_, copy, _) in guard._copies.items()}
    guard.remember()
    assert {key: copy.data_ptr() for key, (_, copy, _) in guard._copies.items()} == copies
    mask.zero_()
    guard.put_back()
    assert torch.equal(mask, torch.ones(4, 4))


def test_buffers_remembered_in_inference_mode_can_be_remembered_again_outside():
    norm = nn.BatchNorm1d(2)
    guard = BufferGuard(norm)
    with torch.inference_mode():
        guard.remember()
    norm(torch.randn(4, 2))
    guard.remember()
    norm(torch.randn(4, 2))
    guard.put_back()
    assert norm.num_batches_tracked == 1
