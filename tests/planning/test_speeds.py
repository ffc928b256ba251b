"""Whose speeds: by name, from a file, of the GPU at hand; measured before given."""

from __future__ import annotations

import pytest
from tests.planning.test_calibration import FOUND

from hybridtrainer.errors import ModelError
from hybridtrainer.planning.calibration import VARIABLE, keep_calibration
from hybridtrainer.planning.cards import BUILT_IN
from hybridtrainer.planning.speeds import speeds_at_hand, speeds_for

CARD = "NVIDIA GeForce RTX 4070"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_cards_are_known_by_name_in_any_case(kept):
    assert speeds_for("h200") is speeds_for("H200") is BUILT_IN["h200"]
    assert speeds_for("rtx-4070").name == CARD


def test_unknown_names_are_answered_with_those_that_there_are(kept):
    with pytest.raises(ModelError, match=r"Did you mean rtx-4070\? Known are: .*l4"):
        speeds_for("RTX-407")
    keep_calibration(kept, "My Card", FOUND)
    with pytest.raises(ModelError, match="Measured here: My Card"):
        speeds_for("rtx-9999")


def test_what_was_measured_goes_before_what_is_given(kept):
    assert speeds_at_hand(CARD) is speeds_for(CARD) is BUILT_IN["rtx-4070"]
    keep_calibration(kept, CARD, FOUND)
    found = speeds_at_hand(CARD)
    assert found == FOUND.hardware(CARD) == speeds_for(CARD.upper())
    assert speeds_for("rtx-4070") is BUILT_IN["rtx-4070"]  # asked for by the name of its data sheet


def test_unknown_gpus_and_machines_without_one_have_no_speeds(kept):
    assert speeds_at_hand("NVIDIA Abacus") is None
    assert speeds_at_hand(None) is None


def test_a_damaged_file_is_said_so_and_not_passed_over(kept):
    kept.write_text("{")
    with pytest.raises(ModelError, match="no JSON"):
        speeds_at_hand(CARD)


def test_a_file_of_one_gpu_needs_no_name_and_of_several_takes_the_one_at_hand(tmp_path, kept):
    other = tmp_path / "other.json"
    keep_calibration(other, "One", FOUND)
    assert speeds_for(str(other)).name == "One"
    keep_calibration(other, "Two", FOUND)
    assert speeds_for(str(other), gpu="Two").name == "Two"
    with pytest.raises(ModelError, match="several GPUs: One, Two"):
        speeds_for(str(other), gpu="Three")
