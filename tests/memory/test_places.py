"""Homes in host memory, cut once into the pieces in which they are copied."""

from __future__ import annotations

import torch

from hybridtrainer.memory import places
from hybridtrainer.memory.places import Home, Slot, cut


def test_a_home_knows_its_pieces_and_what_it_takes_of_a_slot(monkeypatch):
    monkeypatch.setattr(places, "PIECE_BYTES", 3)
    host = torch.arange(9, dtype=torch.uint8)
    home = Home([(0, host[:4]), (8, host[4:])])
    assert home.extents == ((0, 4), (8, 5))
    assert home.nbytes == 13
    assert [piece.tolist() for piece in home.pieces] == [[0, 1, 2], [3], [4, 5, 6], [7, 8]]
    home.pieces[-1].fill_(99)
    assert host.tolist() == [0, 1, 2, 3, 4, 5, 6, 99, 99]  # the same memory


def test_what_is_short_is_one_piece():
    run = torch.zeros(7, dtype=torch.uint8)
    assert [piece.data_ptr() for piece in cut(run)] == [run.data_ptr()]


def test_slots_of_the_same_bytes_are_not_taken_for_each_other():
    assert Slot(torch.zeros(2, dtype=torch.uint8)) != Slot(torch.zeros(2, dtype=torch.uint8))
