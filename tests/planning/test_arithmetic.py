"""Autocast without memory: what it keeps is what torch's own keeps, whoever wrote the products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrainer.kernels.cross_entropy import head_loss
from hybridtrainer.planning.arithmetic import arithmetic
from hybridtrainer.planning.pieces import without_memory
from hybridtrainer.planning.rehearsal import Ledger, rehearse

WIDTH, TIME = 64, 128


class ByHand(nn.Module):
    """Attention without torch's, and a last layer that leaves hidden states of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(512, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = torch.einsum("btd,bsd->bts", q, k) / WIDTH**0.5
        if x.device.type == "cpu":  # where autocast leaves softmax in 16 bits; on a GPU it does not
            scores = scores.float()
        hidden: Tensor = self.out(torch.bmm(F.softmax(scores, dim=-1), v) + (scores.softmax(-1) @ v))
        return hidden


def loss(model: Any, tokens: Tensor) -> Tensor:
    return head_loss(model(tokens[:, :-1]), model.emb.weight, tokens[:, 1:]).mean()


def test_products_by_hand_keep_what_they_really_keep():
    model, tokens = ByHand(), torch.randint(512, (4, TIME + 1))
    with Ledger([*model.parameters(), tokens]) as ledger, torch.autocast("cpu", torch.bfloat16):
        kept = loss(model, tokens)
    really = ledger.spent().left_bytes
    del kept
    empty, values = without_memory(model), torch.empty_like(tokens, device="meta")

    def forward() -> Tensor:
        with arithmetic("bf16"):
            return loss(empty, values)

    spent = rehearse(forward, [*empty.parameters(), values], lambda mean: mean.backward())
    assert spent.kept_bytes == pytest.approx(really, rel=0.02)


def test_torch_is_as_it_was_afterwards():
    names = [(torch, "matmul"), (torch, "softmax"), (F, "softmax"), (F, "linear")]
    before = [getattr(place, name) for place, name in names]
    with arithmetic("bf16"):
        assert [getattr(place, name) for place, name in names] != before
    assert [getattr(place, name) for place, name in names] == before
    assert "__matmul__" not in vars(Tensor)
    assert (torch.eye(2) @ torch.eye(2)).tolist() == [[1.0, 0.0], [0.0, 1.0]]
