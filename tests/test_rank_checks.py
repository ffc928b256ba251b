"""What cannot work on several ranks is said; two ranks hear it in `tests/test_ranks.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import EAGER, gpt_setup
from torch import nn

from hybridtrainer import ranks
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.errors import RankError
from hybridtrainer.rank_checks import own_probes, rank_problems, require_same_on_all_ranks, require_same_start
from hybridtrainer.state import Training


def others_say(monkeypatch: pytest.MonkeyPatch, rank: int, *others: Any) -> None:
    """This is one of several ranks, of which the others always say these things; "the same" echoes this one."""
    monkeypatch.setattr(ranks, "count", lambda: 1 + len(others))
    monkeypatch.setattr(ranks, "rank", lambda: rank)

    def exchange(_topic: str, value: Any) -> list[Any]:
        said = [value if other == "the same" else other for other in others]
        return [*said[:rank], value, *said[rank:]]

    monkeypatch.setattr(ranks, "exchange", exchange)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_the_same_probes_divide_them(monkeypatch, rank):
    others_say(monkeypatch, rank, "the same")
    probes = [torch.ones(2) * number for number in range(4)]
    own = own_probes(probes)
    assert [float(each[0]) for each in own] == [rank, rank + 2] and not own.alike


def test_probes_that_cannot_be_divided_are_measured_by_all_and_count_once(monkeypatch):
    others_say(monkeypatch, 1, "the same")
    own = own_probes([torch.ones(2)])
    assert len(own) == 1 and own.alike


def test_different_numbers_of_probes_are_refused(monkeypatch):
    others_say(monkeypatch, 0, 3)
    with pytest.raises(RankError, match="number of probe batches"):
        own_probes([torch.ones(2)])


def test_probes_of_a_kind_of_their_own_are_each_rank_s_own(monkeypatch):
    others_say(monkeypatch, 0, "the same")
    monkeypatch.setattr(ranks, "exchange", lambda topic, value: [value, value if "number" in topic else "1"])
    assert len(own_probes([object(), object()])) == 2


def test_one_process_keeps_its_probes_and_may_use_every_mechanism():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = own_probes(iter([1, 2, 3]))
    assert probes == [1, 2, 3] and not probes.alike
    assert list(rank_problems(model, optimizer, None, HybridTrainerConfig(predict=["samples"]))) == []
    require_same_start(Training(model, optimizer, None, None), HybridTrainerConfig(), 1, None)


def test_a_plain_model_and_mechanisms_of_one_process_are_refused_on_several_ranks(monkeypatch):
    others_say(monkeypatch, 0, "the same")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = HybridTrainerConfig(predict=["samples", "jumps"], dynamics="mlp", sample_weights=True)
    said = [what for what, _ in rank_problems(model, optimizer, None, config)]
    assert len(said) == 4 and "nothing says how" in said[0] and '"samples"' in said[1] and '"mlp"' in said[3]
    assert "sample_weights" in said[2]


def test_a_state_that_differs_is_named(monkeypatch):
    trainer = gpt_setup(count=1).trainer(settings=EAGER)
    require_same_on_all_ranks(trainer)
    monkeypatch.setattr(ranks, "count", lambda: 2)

    def exchange(topic: str, value: Any) -> list[Any]:
        assert topic == "state"
        return [value, value | {"optimizer": "other"}]

    monkeypatch.setattr(ranks, "exchange", exchange)
    with pytest.raises(RankError, match="their state: optimizer"):
        require_same_on_all_ranks(trainer)
