"""What each rank writes, and what any number of ranks makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtrainer import ranks
from hybridtrainer.rank_files import assemble, first_rows, in_manifest, name_of, own_part, state_of


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, count: int) -> None:
    monkeypatch.setattr(ranks, "count", lambda: count)
    monkeypatch.setattr(ranks, "rank", lambda: rank)


def captured(part: float, rows: int, random: str) -> dict[str, Any]:
    """The state of one of two ranks: a sharded matrix, a bias that is not, Adam's moments, an average."""
    weight, bias = torch.full((rows, 2), part), torch.tensor([5.0])
    return {
        "sharded": ["weight"],
        "parameters": {"weight": weight, "bias": bias},
        "buffers": {"seen": torch.tensor(3)},
        "optimizer": {
            "state": {
                0: {"exp_avg": bias + 1, "step": torch.tensor(4.0)},
                1: {"exp_avg": weight + 1, "step": torch.tensor(4.0)},
            },
            "param_groups": [],
        },
        "readout": {"chosen": 1, "averages": [{"observed": 2, "average": [weight + 2, bias + 2], "shards": [0]}, None]},
        "random": random,
    }


def state(part: float, rows: int, random: str) -> dict[str, Any]:
    return {
        **captured(part, rows, random),
        "signature": {"optimizer_groups": [["bias"], ["weight"]]},
        "history": {"windows": ["cut as this rank has it"], "gram": torch.zeros(2, 1, 1), "anchors": None},
        "undo": captured(part + 10, rows, random),
    }


def test_shards_are_put_together_everywhere_and_what_is_whole_stays():
    whole = assemble([state(1.0, 2, "a"), state(2.0, 1, "b")])
    for tree, moved in ((whole, 0.0), (whole["undo"], 10.0)):
        assert tree["parameters"]["weight"].tolist() == [[1 + moved] * 2, [1 + moved] * 2, [2 + moved] * 2]
        assert tree["parameters"]["bias"].tolist() == [5.0]
        assert tree["optimizer"]["state"][1]["exp_avg"][:, 0].tolist() == [2 + moved, 2 + moved, 3 + moved]
        assert tree["optimizer"]["state"][0]["exp_avg"].tolist() == [6.0]
        assert float(tree["optimizer"]["state"][1]["step"]) == 4
        average, other = tree["readout"]["averages"]
        assert [len(each) for each in average["average"]] == [3, 1] and "shards" not in average and other is None
        assert "sharded" not in tree and tree["random"] == "a"


def test_every_shard_knows_the_row_that_it_begins_with(monkeypatch):
    first, second = state(1.0, 2, "a"), state(2.0, 1, "b")
    second["optimizer"]["state"][1]["exp_avg"] = torch.zeros(2, 2)  # of another shape than its weight: no shard
    told: list[Any] = []

    def listen(_topic: str, value: Any) -> list[Any]:
        told.append(value)
        return [value, value]

    monkeypatch.setattr(ranks, "exchange", listen)
    for rank, each in enumerate((first, second)):
        as_rank(monkeypatch, rank, 2)
        first_rows(each)
    monkeypatch.setattr(ranks, "exchange", lambda *_: told)
    rows = first_rows(second)
    for tree, moment in ((second, 0), (second["undo"], 2)):
        assert rows[id(tree["parameters"]["weight"])] == 2
        assert rows[id(tree["optimizer"]["state"][1]["exp_avg"])] == moment
        average, _ = tree["readout"]["averages"]
        assert rows[id(average["average"][0])] == 2
        for whole in (tree["parameters"]["bias"], tree["optimizer"]["state"][0]["exp_avg"], average["average"][1]):
            assert rows.get(id(whole), 0) == 0
    as_rank(monkeypatch, 0, 2)
    assert set(first_rows(first).values()) == {0}


def test_windows_of_shards_are_left_behind():
    history = assemble([state(1.0, 2, "a"), state(2.0, 1, "b")])["history"]
    assert history["windows"] == [] and history["gram"].shape == (2, 0, 0) and history["anchors"] is None


def test_further_ranks_write_only_what_differs(monkeypatch):
    copies = {"random": "a", "parameters": {}, "undo": {"random": "b", "parameters": {}}}
    as_rank(monkeypatch, 0, 2)
    assert own_part(copies) is copies and in_manifest(copies) == {"ranks": {"count": 2, "sharded": False}}
    as_rank(monkeypatch, 1, 2)
    assert own_part(copies) == {"random": "a", "undo_random": "b"}
    assert own_part(copies | {"undo": None})["undo_random"] is None
    shards = state(1.0, 2, "a")
    assert own_part(shards) is shards and in_manifest(shards)["ranks"]["sharded"]


def test_one_process_says_nothing_of_ranks():
    assert in_manifest({"w": 1}) == {} and name_of(0) == "state"


COPIES: dict[str, Any] = {
    "state": {"random": "first", "undo": {"random": "first then"}},
    "rank-0001": {"random": "second", "undo_random": "second then"},
}


@pytest.mark.parametrize(
    ("rank", "count", "expected"), [(0, 2, "first"), (1, 2, "second"), (0, 1, "first"), (2, 3, None)]
)
def test_copies_get_their_own_random_numbers_back_as_far_as_they_were_there(monkeypatch, rank, count, expected):
    as_rank(monkeypatch, rank, count)
    found = state_of({"ranks": {"count": 2, "sharded": False}}, lambda name: dict(COPIES[name]), sharded=False)
    if expected is None:  # a rank that is new goes on with its own
        assert torch.equal(found["random"]["torch"], torch.get_rng_state())
    else:
        assert (found["random"], found["undo"]["random"]) == (expected, f"{expected} then")


def test_a_checkpoint_of_one_process_does_not_give_two_ranks_the_same_random_numbers(monkeypatch):
    as_rank(monkeypatch, 1, 2)
    found = state_of({}, lambda name: dict(COPIES[name]), sharded=False)
    assert torch.equal(found["random"]["torch"], torch.get_rng_state())


@pytest.mark.parametrize(("count", "sharded", "rows"), [(2, True, 1), (2, False, 3), (1, False, 3), (3, True, 3)])
def test_shards_go_to_as_many_ranks_as_they_are_or_are_put_together(monkeypatch, count, sharded, rows):
    as_rank(monkeypatch, min(1, count - 1), count)
    files = {"state": state(1.0, 2, "a"), "rank-0001": state(2.0, 1, "b")}
    found = state_of({"ranks": {"count": 2, "sharded": True}}, files.__getitem__, sharded)
    assert len(found["parameters"]["weight"]) == rows
