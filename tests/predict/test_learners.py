from __future__ import annotations

import pytest
import torch

from hybridtrainer.predict.learners import MEMBERS, TRAINING, Kind, make_model


@pytest.mark.parametrize(("kind", "members"), [("rssm", 3), ("mlp", MEMBERS), ("linear", 1)])
def test_each_kind_has_its_members_and_says_something_of_every_horizon(kind: Kind, members: int):
    model = make_model(kind, (1, 4), 5, torch.Generator().manual_seed(0), "cpu", parameters=10**8)
    assert model is not None
    assert model.correction().gates.shape == (members, 2, 5)
    assert TRAINING[kind].rate > 0


def test_a_blend_has_no_model():
    assert make_model("blend", (1,), 5, torch.Generator(), "cpu", 0) is None
    assert "blend" not in TRAINING


def test_equal_seeds_make_equal_models():
    one, other = (make_model("mlp", (1,), 5, torch.Generator().manual_seed(4), "cpu", 0) for _ in range(2))
    assert one is not None
    assert other is not None
    for mine, theirs in zip(one.weights().values(), other.weights().values(), strict=True):
        assert torch.equal(mine, theirs)
