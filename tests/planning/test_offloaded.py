"""A rehearsal of activations in host memory: what leaves, and that it comes back in its own shape."""

from __future__ import annotations

import torch

from hybridtrainer.memory.offload import AHEAD
from hybridtrainer.models.gpt import build_gpt
from hybridtrainer.planning.offloaded import Away, let_go


def test_what_blocks_save_leaves_and_gradients_are_there_all_the_same():
    model = build_gpt("nano", device="meta")
    away = let_go(model)
    assert away == Away(0, 0)
    model(torch.zeros(2, 16, dtype=torch.long, device="meta")).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    hidden = 2 * 16 * model.config.width * 4
    assert away.nbytes > 8 * model.config.blocks * hidden
    assert away.largest >= hidden
    assert away.on_the_way_bytes == AHEAD * away.largest


def test_weights_stay():
    model = build_gpt("nano", device="meta")
    away = let_go(model)
    model(torch.zeros(1, 2, dtype=torch.long, device="meta")).sum().backward()
    assert away.nbytes < sum(parameter.nbytes for parameter in model.blocks.parameters())
