"""Blocks that are left out for a while."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from hybridtrainer.predict.shortening import Shortening, shortenings_of


def stack(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))


def test_a_short_stack_is_its_first_blocks_and_a_whole_one_is_as_it_was_made():
    model, x = stack(), torch.ones(2, 3)
    whole, first = model(x), model[1](model[0](x))
    shortening = Shortening(list(model), 2)
    assert shortenings_of(model) == []
    shortening.be(short=True)
    assert torch.equal(model(x), first)
    assert shortenings_of(model) == [shortening]
    shortening.be(short=False)
    assert torch.equal(model(x), whole)
    assert not any("forward" in block.__dict__ for block in model)


def test_what_others_have_put_around_a_block_before_is_called_and_put_back():
    model, x = stack(), torch.ones(2, 3)
    own = model[0].forward
    double = lambda hidden: 2 * own(hidden)  # noqa: E731
    model[0].forward = double
    shortening = Shortening(list(model), 1)
    shortening.be(short=True)
    assert torch.equal(model(x), 2 * own(x))
    shortening.be(short=False)
    assert model[0].forward is double


def test_what_others_put_around_a_block_since_stays_and_ours_only_calls_on():
    model, x = stack(), torch.ones(2, 3)
    whole = model(x)
    shortening = Shortening(list(model), 1)
    shortening.be(short=True)
    inside = model[3].forward
    seen: list[Tensor] = []

    def outside(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return inside(hidden)  # type: ignore[no-any-return]

    model[3].forward = outside
    shortening.be(short=False)
    assert torch.equal(model(x), whole)
    assert len(seen) == 1


def test_a_copy_goes_its_own_way():
    model, x = stack(), torch.ones(2, 3)
    shortening = Shortening(list(model), 2)
    shortening.be(short=True)
    short = model(x)
    shortening.beside = [(short,)]  # has a graph, which cannot be copied
    twin = deepcopy(model)
    shortening.beside = []
    (other,) = shortenings_of(twin)
    assert other is not shortening
    other.be(short=False)
    assert shortening.is_short
    assert torch.equal(model(x), short)
    assert not torch.equal(twin(x), short)
