"""What a run is fed with: positions that are taken down, taken up and refused."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.data.chosen import ChosenLoader
from hybridtrainer.errors import ForeignCheckpointError
from hybridtrainer.feed import Feed
from hybridtrainer.losses import CheckedLoss
from hybridtrainer.phases import policy
from hybridtrainer.standing import Standing

DATA = list(range(40))


def make(**settings: Any) -> tuple[Feed, Standing]:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch.float().unsqueeze(1)).square().mean(1)  # type: ignore[no-any-return]

    config = HybridTrainerConfig(**settings)
    return Feed(config, CheckedLoss(nn.Linear(1, 1), loss, "fp32"), print), Standing(policy.start(config))


def test_without_a_loader_there_is_no_position_and_nothing_to_go_back_to():
    feed, at = make()
    feed.note(at)
    feed.rewind(at)
    feed.expect(1)
    feed.require_same(at, "here")
    assert at.data is None


@pytest.mark.parametrize("predict", ["off", ["samples"]])
def test_a_position_is_taken_down_and_gone_back_to(predict):
    feed, at = make(predict=predict, seed=3)
    loader = feed.loader(at, DATA, 4)
    assert isinstance(loader, ChosenLoader) is (predict != "off")
    assert at.data is not None
    first = [batch.tolist() for batch in islice(loader, 3)]
    assert feed.left_out() == (None if predict == "off" else 0)  # none of them is known yet
    feed.note(at)
    then = [batch.tolist() for batch in islice(loader, 2)]
    feed.rewind(at)
    assert [batch.tolist() for batch in islice(loader, 2)] == then
    assert first != then


@pytest.mark.parametrize("predict", ["off", ["samples"]])
def test_a_position_that_was_loaded_before_is_taken_up(predict):
    feed, at = make(predict=predict)
    loader = feed.loader(at, DATA, 4)
    list(islice(loader, 3))
    feed.note(at)
    expected = [batch.tolist() for batch in islice(loader, 4)]
    other, standing = make(predict=predict)
    standing.data = at.data
    assert [batch.tolist() for batch in islice(other.loader(standing, DATA, 4), 4)] == expected


def test_a_position_of_other_data_is_refused():
    feed, at = make()
    feed.loader(at, DATA, 4)
    other, standing = make()
    standing.data = at.data
    with pytest.raises(ForeignCheckpointError, match="samples"):
        other.loader(standing, DATA[:30], 4)
    with pytest.raises(ForeignCheckpointError, match="chosen"):
        make(predict="off")[0].loader(standing, DATA, 4)
    assert torch.is_tensor(next(iter(feed.loader(at, DATA, 4))))


def test_with_auto_a_last_batch_that_is_not_full_is_given():
    feed, at = make(predict="auto")
    assert [len(batch) for batch in feed.loader(at, DATA[:10], 4, keep_partial=True)] == [4, 4, 2]
