"""`hybridtrainer bench` as people type it."""

from __future__ import annotations

import json
from typing import get_args

import pytest
import torch
from typer.testing import CliRunner, Result

from hybridtrainer.cli import app
from hybridtrainer.cli_bench import MODES
from hybridtrainer.kernels.formats import Mode

FAST = ["--model", "nano", "--blocks", "2", "--tokens", "32", "--context", "16", "--steps", "1", "--device", "cpu"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_help_names_every_engine_and_every_option():
    assert "stream" in invoke("--help").output
    assert "kernels" in invoke("--help").output
    result = invoke("stream", "--help")
    assert result.exit_code == 0
    words = result.output.replace(",", " ").split()
    assert sorted({word for word in words if word.startswith("--")}) == [
        "--blocks", "--context", "--device", "--help", "--json", "--max-gpu-blocks", "--mode", "--model",
        "--no-offload-activations", "--no-pack-weights", "--offload-activations", "--pack-weights", "--split",
        "--steps", "--tokens", "--vram-cap",
    ]  # fmt: skip


def test_json_is_one_object_with_the_settings_that_were_given():
    result = invoke(
        "stream", *FAST, "--mode", "sr8", "--split", "2", "--offload-activations", "--max-gpu-blocks", "1",
        "--vram-cap", "1GB", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["case"] | {"memory": None} == {
        "model": "nano", "memory": None, "tokens": 32, "context": 16, "blocks": 2, "steps": 1, "clip_norm": None,
        "tile_tokens": 1024, "without_copies": True,
    }  # fmt: skip
    memory = found["case"]["memory"]
    assert (memory["mode"], memory["split"], memory["max_gpu_blocks"]) == ("sr8", 2, 1)
    assert (memory["vram"], memory["offload_activations"]) == ("1GB", True)
    assert found["tokens_per_second"] > 0


def test_people_get_lines():
    result = invoke("stream", *FAST)
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.stdout
    assert "parameters in host memory" in result.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--model", "gpt5"], "no model named 'gpt5'"),
        (["--mode", "fp8"], "memory.mode"),
        (["--mode", "resident"], "nothing to stream"),
        (["--vram-cap", "much"], "memory.vram"),
        (["--max-gpu-blocks", "0"], "memory.max_gpu_blocks"),
        (["--tokens", "33"], "no whole sequences"),
        (["--context", "0"], "context"),
        (["--steps", "0"], "steps"),
        (["--tokens", "-16"], "tokens"),
        (["--device", "toaster"], "toaster"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_errors_of_configuration(changes, message):
    result = invoke("stream", *FAST, *changes)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_modes_are_those_that_stream():
    assert get_args(Mode) == MODES


@pytest.mark.parametrize("mode", ["fp8", "resident", "auto"])
def test_a_mode_that_does_not_stream_is_answered_with_those_that_do(mode):
    result = invoke("stream", *FAST, "--mode", mode)
    assert result.exit_code == 2
    assert f"--mode: memory.mode is '{mode}', not one of fp32, split8, sr8, sr4, factored" in result.stderr
    assert not [each for each in ("resident", "auto", "plan(") if each != mode and each in result.stderr]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_option_that_needs_none_is_named():
    result = invoke("stream", "--model", "nano")
    assert result.exit_code == 2
    assert "--device cpu measures on the CPU" in result.stderr and "train.device" not in result.stderr
    assert "train.device" not in invoke("kernels").stderr


def test_a_cap_that_limits_nothing_says_so():
    result = invoke("stream", *FAST, "--vram-cap", "1MB")
    assert result.exit_code == 0
    assert "--vram-cap limits nothing here" in result.stderr
    assert "--vram-cap" not in invoke("stream", *FAST).stderr


def test_errors_are_json_too():
    result = invoke("stream", *FAST, "--model", "gpt5", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["type"] == "ModelError"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_cannot_be_timed_without_a_gpu():
    result = invoke("kernels", "--json")
    assert result.exit_code != 0
    assert "torch finds none here" in result.output
