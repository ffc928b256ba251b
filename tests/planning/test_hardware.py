"""Speeds by name."""

from __future__ import annotations

import pytest

from hybridtrainer.errors import ModelError
from hybridtrainer.planning.hardware import H200, known


def test_what_was_measured_is_known_by_name():
    assert known("h200") is known("H200") is H200


def test_what_was_not_measured_is_not_made_up():
    with pytest.raises(ModelError, match="h200"):
        known("rtx-9999")
