"""The tensors inside a slot, made once."""

from __future__ import annotations

import torch

from hybridtrainer.memory.layout import Kind, lay_out
from hybridtrainer.memory.slots import Slot
from hybridtrainer.memory.views import Views

KINDS = [
    Kind("w", (3, 2), "fp32", True),
    Kind("frozen", (4,), "fp32", False, torch.float32),
    Kind("b", (5,), "fp32", True),
]
LAYOUT = lay_out(KINDS)


def slot() -> Slot:
    return Slot(torch.zeros(4096, dtype=torch.uint8))


def test_views_are_inside_the_slot():
    views, place = Views(), slot()
    for number, view in enumerate(views.weights(place, LAYOUT), start=1):
        view.fill_(number)
    assert [tuple(view.shape) for view in views.weights(place, LAYOUT)] == [(3, 2), (4,), (5,)]
    assert [entry.weight_view(place.buffer).flatten()[0].item() for entry in LAYOUT.entries] == [1.0, 2.0, 3.0]


def test_trainable_ones_leave_out_what_is_frozen():
    views, place = Views(), slot()
    weights = views.weights(place, LAYOUT)
    trained = views.trainable(place, LAYOUT)
    assert [view.data_ptr() for view in trained] == [weights[0].data_ptr(), weights[2].data_ptr()]
    assert [sorted(state) for state in views.states(place, LAYOUT)] == [["m", "v"], ["m", "v"]]
    views.states(place, LAYOUT)[1]["v"].fill_(6)
    assert LAYOUT.entries[2].state_views(place.buffer)["v"].tolist() == [6.0] * 5


def test_views_are_made_once_for_each_slot_and_layout():
    views, one, other = Views(), slot(), slot()
    frozen = lay_out([Kind(kind.name, kind.shape, kind.format, False, torch.float32) for kind in KINDS])
    assert views.weights(one, LAYOUT) is views.weights(one, LAYOUT)
    assert views.weights(one, LAYOUT) is not views.weights(other, LAYOUT)
    assert views.weights(one, LAYOUT)[0].data_ptr() != views.weights(other, LAYOUT)[0].data_ptr()
    assert len(views.trainable(one, LAYOUT)) == 2
    assert views.trainable(one, frozen) == []
