"""Which models may begin short by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.models.gpt import GPT, GPTConfig
from hybridtrainer.predict.depth_checks import all_learn, are_fresh, chained, has_attention


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig("gpt2", 6, 32, 2, vocabulary=256, context=16))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(16)[None]).square().mean().backward()
    optimizer.step()


def test_blocks_are_fresh_until_a_step_has_trained_them():
    model = build()
    assert are_fresh(list(model.blocks))
    train(model)
    assert not are_fresh(list(model.blocks))


def test_blocks_learn_where_the_optimizer_has_all_of_them_and_none_is_frozen():
    model = build()
    blocks = list(model.blocks)
    assert all_learn(blocks, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not all_learn(blocks, torch.optim.SGD(model.blocks[3:].parameters(), lr=0.1))
    assert all_learn(blocks, None)
    next(model.blocks[1].parameters()).requires_grad_(False)
    assert not all_learn(blocks, None)


def test_without_norms_nobody_can_tell():
    assert not are_fresh([nn.Linear(2, 2)])


def test_attention_is_known_by_its_name():
    assert has_attention(build().blocks[0])
    assert has_attention(nn.TransformerEncoderLayer(8, 2))
    assert not has_attention(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda a, b, x: b(a(x)), True),
        (lambda a, b, x: b(a(b(a(x)))), True),  # a stack that is gone through twice is one
        (lambda a, b, x: a(b(x)), False),
        (lambda a, b, x: a(x) + b(x), False),
        (lambda a, b, x: b(a(x) + 0), False),
        (lambda a, b, x: a(x), False),
        (lambda a, b, x: x, False),
    ],
)
def test_blocks_follow_each_other_where_each_has_the_result_of_the_one_before(call: Any, expected):
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    with chained([one, other]) as is_chain:
        call(one, other, torch.ones(2, 4))
    assert is_chain() is expected
    assert not one._forward_hooks and not other._forward_hooks


def test_two_batches_are_two_passes_and_tuples_and_names_are_understood():
    class Block(nn.Module):
        def forward(self, *, hidden: Tensor) -> tuple[Tensor, int]:
            return hidden + 1, 7

    blocks = [Block(), Block()]
    with chained(blocks) as is_chain:
        for _ in range(2):
            hidden = torch.ones(2)
            for block in blocks:
                hidden, _seven = block(hidden=hidden)
    assert is_chain()


def test_blocks_that_change_the_shape_are_no_stack():
    blocks = [nn.Linear(4, 6), nn.Linear(6, 4)]
    with chained(blocks) as is_chain:
        blocks[1](blocks[0](torch.ones(1, 4)))
    assert not is_chain()
