"""The tensors inside a slot, made once."""

from __future__ import annotations

import torch

from hybridtrainer.memory import places
from hybridtrainer.memory.layout import Kind, lay_out
from hybridtrainer.memory.places import Home, Slot
from hybridtrainer.memory.portions import divide
from hybridtrainer.memory.views import pieces_in, states_in, targets_in, trainable_in, weights_in

KINDS = [
    Kind("w", (3, 2), "fp32", True),
    Kind("frozen", (4,), "fp32", False, torch.float32),
    Kind("b", (5,), "fp32", True),
]
LAYOUT = lay_out(KINDS)
(PORTION,) = divide(LAYOUT)


def slot() -> Slot:
    return Slot(torch.zeros(4096, dtype=torch.uint8))


def test_views_are_inside_the_slot():
    place = slot()
    for number, view in enumerate(weights_in(place, LAYOUT), start=1):
        view.fill_(number)
    assert [tuple(view.shape) for view in weights_in(place, LAYOUT)] == [(3, 2), (4,), (5,)]
    assert [entry.weight_view(place.buffer).flatten()[0].item() for entry in LAYOUT.entries] == [1.0, 2.0, 3.0]


def test_trainable_ones_leave_out_what_is_frozen():
    place = slot()
    weights = weights_in(place, LAYOUT)
    trained = trainable_in(place, LAYOUT)
    assert [view.data_ptr() for view in trained] == [weights[0].data_ptr(), weights[2].data_ptr()]
    assert [view.tolist() for view in targets_in(place, LAYOUT)] == [[0.0] * 6, [0.0] * 5]
    assert [sorted(state) for state in states_in(place, PORTION)] == [["m", "v"], ["m", "v"]]
    states_in(place, PORTION)[1]["v"].fill_(6)
    assert LAYOUT.entries[2].state_views(place.buffer)["v"].tolist() == [6.0] * 5


def test_views_are_made_once_for_each_slot_and_layout():
    one, other = slot(), slot()
    frozen = lay_out([Kind(kind.name, kind.shape, kind.format, False, torch.float32) for kind in KINDS])
    assert weights_in(one, LAYOUT) is weights_in(one, LAYOUT)
    assert weights_in(one, LAYOUT) is not weights_in(other, LAYOUT)
    assert weights_in(one, LAYOUT)[0].data_ptr() != weights_in(other, LAYOUT)[0].data_ptr()
    assert len(trainable_in(one, LAYOUT)) == 2
    assert trainable_in(one, frozen) == []


def test_the_pieces_of_a_key_lie_where_its_runs_do_and_are_those_of_all_that_lie_alike(monkeypatch):
    monkeypatch.setattr(places, "PIECE_BYTES", 3)
    host = torch.arange(12, dtype=torch.uint8)
    home, alike, other = (Home([(0, host[:first]), (8, host[first:])]) for first in (5, 5, 4))
    place = slot()
    for number, piece in enumerate(pieces_in(place, home), start=1):
        piece.fill_(number)
    assert place.buffer[:17].tolist() == [1, 1, 1, 2, 2, 0, 0, 0, 3, 3, 3, 4, 4, 4, 5, 0, 0]
    assert pieces_in(place, alike) is pieces_in(place, home)
    assert [len(piece) for piece in pieces_in(place, other)] == [3, 1, 3, 3, 2]
