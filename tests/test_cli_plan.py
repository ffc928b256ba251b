"""`hybridtrainer plan`: answers for people and for programs, whose speeds they take, and the file it writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.planning.test_calibration import FOUND
from typer.testing import CliRunner

from hybridtrainer.cli import app
from hybridtrainer.config_io import load_config
from hybridtrainer.planning import machine, planner
from hybridtrainer.planning.calibration import VARIABLE, keep_calibration
from hybridtrainer.planning.machine import Gpu

SMALL = ["--ram", "16GB", "--model", "nano", "--seq", "128", "--tokens", "256"]


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "calibration.json"))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def data(*arguments: str) -> dict[str, Any]:
    code, text = run(*SMALL, *arguments, "--json")
    assert code == 0, text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_plan_says_what_it_takes_and_how_to_get_it():
    enough = ["--vram", "3GB", "--ram", "16GB", "--model", "gpt2-124m", "--seq", "512", "--tokens", "2048"]
    code, text = run(*enough, "--hardware", "h200")
    assert code == 0
    for words in ("fits", "[memory]", "activations", "tokens/s", "Next best", "% time)", "NVIDIA H200"):
        assert words in text


def test_as_json():
    found = data("--vram", "3GB")
    assert found["best"]["gpu_bytes"] < 3 << 30
    assert found["best"]["seconds_per_step"] is None and found["hardware"] is None


@pytest.mark.slow
def test_averages_are_counted_as_the_readout_says():
    found = {readout: data("--vram", "3GB", "--readout", readout) for readout in ("auto", "last", "averaged")}
    kept = [found[readout]["best"]["gpu"].get("averages", 0) for readout in ("last", "averaged", "auto")]
    assert kept == [0, kept[1], 2 * kept[1]] and kept[1] > 0
    assert found["averaged"]["readout"] == "averaged"
    code, text = run(*SMALL, "--vram", "3GB", "--readout", "averaged")
    assert code == 0 and 'readout = "averaged"' in text


@pytest.mark.slow
def test_a_card_by_name_brings_its_memory_and_says_that_it_was_not_measured():
    code, text = run(*SMALL, "--hardware", "rtx-4060")
    assert code == 0
    assert "GPU, 8.00 GiB" in text and "RTX 4060, given: the data sheet" in text and "not measured" in text
    assert data("--hardware", "rtx-4060", "--vram", "3GB")["vram_bytes"] == 3 << 30


def test_a_file_of_another_machine_gives_its_speeds(tmp_path):
    keep_calibration(tmp_path / "theirs.json", "Their Card", FOUND)
    found = data("--hardware", str(tmp_path / "theirs.json"))
    assert (found["hardware"]["name"], found["vram_bytes"]) == ("Their Card", FOUND.vram_bytes)
    assert found["hardware"]["origin"] == "measured on 2026-01-02"


@pytest.mark.slow
def test_the_gpu_at_hand_is_taken_where_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "gpu_at_hand", lambda: Gpu("My Card", 6 << 30))
    assert data()["hardware"] is None
    keep_calibration(tmp_path / "calibration.json", "My Card", FOUND)
    found = data()
    assert (found["hardware"]["name"], found["vram_bytes"]) == ("My Card", 6 << 30)
    assert data("--hardware", "none")["hardware"] is None
    assert data("--hardware", "none")["vram_bytes"] == 6 << 30


def test_accumulation_is_planned_for():
    code, text = run(*SMALL, "--vram", "3GB", "--accumulate", "2")
    assert code == 0
    assert "batch_size = 1 " in text and "accumulate = 2 " in text


@pytest.mark.slow
def test_what_it_writes_can_be_trained(tmp_path):
    path = tmp_path / "recipe.toml"
    code, text = run(*SMALL, "--vram", "3GB", "--write", str(path))
    assert code == 0
    assert f"hybridtrainer train {path}" in text
    config = load_config(path)
    assert (config.model.name, config.memory.mode, config.train.batch_size) == ("nano", "resident", 2)
    code, text = run(*SMALL, "--vram", "3GB", "--write", str(path))
    assert code == 5 and "--force" in text
    assert run(*SMALL, "--vram", "3GB", "--write", str(path), "--force")[0] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU whose memory is taken")
def test_without_a_gpu_its_memory_must_be_given():
    code, text = run("--ram", "16GB")
    assert code == 2
    assert "--vram 16GB" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU whose memory is taken")
def test_every_mistake_is_told_at_once():
    code, text = run("--model", "gpt-7", "--ram", "much", "--tokens", "-5", "--accumulate", "0")
    assert code == 2 and "the plan has 5 errors" in text
    for words in ("vram: there is no GPU", "ram: must be", "tokens: must", "accumulate: must", "named 'gpt-7'"):
        assert words in text
    code, text = run("--hardware", "abacus", "--seq", "0")
    assert code == 2 and "hardware: The speeds of 'abacus'" in text and "seq: must" in text and "vram:" not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that could be measured")
def test_without_a_gpu_nobody_is_told_to_measure_one(monkeypatch):
    for given in (["--vram", "3GB"], ["--hardware", "abacus"]):
        assert "--calibrate" not in run(*SMALL, *given)[1]
    monkeypatch.setattr(machine, "gpu_at_hand", lambda: Gpu("My Card", 6 << 30))
    assert "--calibrate" in run(*SMALL)[1]


def test_a_damaged_file_of_measurements_is_told_and_can_be_gone_without(tmp_path):
    (tmp_path / "calibration.json").write_text("{")
    code, text = run(*SMALL, "--vram", "3GB")
    assert code == 2 and "calibration.json is no calibration" in text and "--hardware none" in text
    assert run(*SMALL, "--vram", "3GB", "--hardware", "none")[0] == 0


def test_a_file_that_is_there_is_refused_before_anything_is_planned(tmp_path, monkeypatch):
    path = tmp_path / "recipe.toml"
    path.write_text("mine")
    monkeypatch.setattr(planner, "plan", lambda *_, **__: pytest.fail("it was planned"))
    code, text = run(*SMALL, "--vram", "3GB", "--write", str(path))
    assert code == 5 and "is there already" in text and path.read_text() == "mine"
