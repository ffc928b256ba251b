"""Measurements survive in their file, and what is no such file is refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridtrainer.errors import HybridTrainerError, ModelError
from hybridtrainer.planning.calibration import (
    MEMORY_SHARE,
    PRODUCT_SHARE,
    VARIABLE,
    Measured,
    calibration_path,
    keep_calibration,
    read_calibration,
)

FOUND = Measured(40e12, 450e9, 24e9, 25e9, 40e9, 9e-6, 700 << 20, 12 << 30, "2026-01-02")


def test_what_is_kept_is_read_again_and_others_stay(tmp_path):
    path = tmp_path / "new" / "calibration.json"
    keep_calibration(path, "One", FOUND)
    keep_calibration(path, "Two", replace(FOUND, flops=1e12))
    keep_calibration(path, "One", replace(FOUND, flops=2e12))
    assert read_calibration(path) == {"One": replace(FOUND, flops=2e12), "Two": replace(FOUND, flops=1e12)}
    assert [file.name for file in path.parent.iterdir()] == ["calibration.json"]


def test_a_plan_takes_the_share_that_a_step_reaches():
    machine = FOUND.hardware("Card")
    assert (machine.name, machine.flops, machine.memory) == (
        "Card", PRODUCT_SHARE * 40e12, MEMORY_SHARE * 450e9,
    )  # fmt: skip
    assert (machine.inward, machine.outward, machine.both, machine.launch) == (24e9, 25e9, 40e9, 9e-6)
    assert (machine.context_bytes, machine.vram_bytes) == (700 << 20, 12 << 30)
    assert machine.origin == "measured on 2026-01-02"


def test_the_file_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    assert calibration_path() == tmp_path / "mine.json"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert calibration_path() == tmp_path / "hybridtrainer" / "calibration.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert calibration_path() == tmp_path / "home" / ".config" / "hybridtrainer" / "calibration.json"


def content(**changes: Any) -> dict[str, Any]:
    figures = {name: getattr(FOUND, name) for name in Measured.__dataclass_fields__}
    return {"format": "hybridtrainer-calibration", "version": 1, "gpus": {"Card": figures | changes}}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "is no calibration"),
        (b'{"format": "other"}', "is no calibration"),
        (json.dumps(content() | {"version": 2}).encode(), "has version 2"),
        (json.dumps(content() | {"gpus": {}}).encode(), "no GPU"),
        (json.dumps(content() | {"gpus": {"Card": 3}}).encode(), "does not have the figures"),
        (json.dumps(content(extra=1)).encode(), "does not have the figures"),
        (json.dumps(content(flops=0)).encode(), "no sensible flops"),
        (json.dumps(content(memory="fast")).encode(), "no sensible memory"),
        (json.dumps(content(both=float("nan"))).encode(), "no sensible both"),
        (json.dumps(content(inward=-1.0)).encode(), "no sensible inward"),
        (json.dumps(content(launch=True)).encode(), "no sensible launch"),
    ],
)
def test_files_that_are_no_calibration_are_refused_and_left_alone(tmp_path, raw, words):
    path = tmp_path / "calibration.json"
    path.write_bytes(raw)
    for touch in (lambda: read_calibration(path), lambda: keep_calibration(path, "Card", FOUND)):
        with pytest.raises(ModelError, match=words) as refused:
            touch()
        assert str(path) in refused.value.what
        assert "--calibrate" in refused.value.remedy
    assert path.read_bytes() == raw


def test_a_file_that_is_not_there_or_cannot_be_written_is_said_so(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        read_calibration(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(HybridTrainerError, match="cannot be written") as refused:
        keep_calibration(tmp_path / "file" / "calibration.json", "Card", FOUND)
    assert VARIABLE in refused.value.remedy
