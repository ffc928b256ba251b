"""Cards from their data sheets: derated as the one that was measured, and said to be given."""

from __future__ import annotations

import pytest

from hybridtrainer.planning.cards import BUILT_IN, CARDS, PCIE_5_X16, Card, speeds_of
from hybridtrainer.planning.hardware import H200


def test_the_measured_card_from_its_data_sheet_is_as_it_was_measured():
    found = speeds_of(Card("NVIDIA H200", 989, 4800, PCIE_5_X16, 140))
    for name in ("flops", "memory", "inward", "outward", "both"):
        assert getattr(found, name) == pytest.approx(getattr(H200, name))


def test_given_cards_say_so_and_reach_less_than_their_data_sheets():
    for name, card in CARDS.items():
        found = BUILT_IN[name]
        assert "not measured" in found.origin
        assert 0 < found.flops < card.tflops * 1e12
        assert 0 < found.memory < card.gb_per_s * 1e9
        assert 0 < found.inward < card.link
        assert found.vram_bytes == card.gib << 30
    assert "not measured" not in BUILT_IN["h200"].origin
