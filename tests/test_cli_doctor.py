"""`hybridtrainer doctor`: what is there, and speeds that are measured once and kept."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from tests.planning.test_calibration import FOUND
from typer.testing import CliRunner, Result

from hybridtrainer.bench import calibrate
from hybridtrainer.cli import app
from hybridtrainer.planning.calibration import VARIABLE, keep_calibration, read_calibration

CARD = "NVIDIA GeForce RTX 4070"


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as anybody asks."""
    card = SimpleNamespace(name=CARD, total_memory=12 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(calibrate, "calibrate", lambda device, say: (say("measuring ..."), FOUND)[1])


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_calibrating_says_so_and_keeps_nothing(kept):
    result = invoke("--calibrate")
    assert result.exit_code == 2
    assert "no GPU here: there is nothing to measure" in result.output
    assert json.loads(invoke("--calibrate", "--json").output)["error"]["type"] == "ModelError"
    assert not kept.exists()


def test_what_is_measured_is_told_and_kept(gpu, kept):
    result = invoke("--calibrate")
    assert result.exit_code == 0
    assert "40.0 TFLOP/s" in result.output and str(kept) in result.output
    assert read_calibration(kept) == {CARD: FOUND}
    told = json.loads(invoke("--calibrate", "--json").output)
    assert (told["gpu"], told["path"], told["measured"]["flops"]) == (CARD, str(kept), FOUND.flops)


def speeds() -> tuple[bool, str]:
    checks = json.loads(invoke("--json").output)["checks"]
    return next((well, told) for name, well, told in checks if name == "speeds")


def test_the_diagnosis_says_whether_speeds_are_known_and_what_to_do(gpu, kept):
    well, told = speeds()
    assert not well and "not measured" in told and "--calibrate" in told
    keep_calibration(kept, CARD, FOUND)
    assert speeds() == (True, f"of {CARD}, measured on 2026-01-02")
    kept.write_text("{")
    well, told = speeds()
    assert not well and str(kept) in told and "may be removed" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_are_no_speeds():
    well, told = speeds()
    assert not well and "--hardware" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_damaged_file_is_told_without_a_gpu_too(kept):
    kept.write_text("{")
    well, told = speeds()
    assert not well and f"{kept} is no calibration" in told and "may be removed" in told


def test_nothing_is_measured_that_could_not_be_kept(gpu, kept, monkeypatch):
    kept.write_text("{")
    monkeypatch.setattr(calibrate, "calibrate", lambda device, say: pytest.fail("it was measured"))
    result = invoke("--calibrate")
    assert result.exit_code == 2 and "is no calibration" in result.output
