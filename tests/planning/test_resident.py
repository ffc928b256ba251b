"""Resident steps: against what was measured, and against what is known by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridtrainer.config import MemoryConfig
from hybridtrainer.models.gpt import build_gpt
from hybridtrainer.planning.estimate import WORKSPACE_BYTES
from hybridtrainer.planning.resident import estimate_resident

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def estimate(every: int = 0, precision: str = "bf16", samples: int = 8):
    model = build_gpt("gpt2-124m", context=512, vocabulary=256, dropout=0.1, device="meta")
    memory = MemoryConfig.model_validate({"precision": precision, "checkpoint_every": every})
    return estimate_resident(model, memory, samples, 512)


def test_what_was_measured_is_what_is_planned():
    """`benchmarks.gpu_check`: the peak that was allocated in real steps with bf16 arithmetic."""
    measured = json.loads((RESULTS / "gpu_check.json").read_text())["gpt2-124m"]["peak_real_gib"] * 2**30
    found = estimate()
    assert found.gpu_bytes - found.gpu["fragments"] == pytest.approx(measured, rel=0.05)


def test_components_are_those_of_adamw():
    found = estimate()
    parameters = sum(
        each.numel() for each in build_gpt("gpt2-124m", context=512, vocabulary=256, device="meta").parameters()
    )
    assert found.gpu["weights"] == found.gpu["gradients"] == 4 * parameters
    assert found.gpu["optimizer states"] == 8 * parameters
    assert found.gpu["workspace"] == WORKSPACE_BYTES
    assert found.disk_bytes == 12 * parameters


def test_blocks_computed_again_and_16_bits_save_activations():
    plain, again, wide = estimate(), estimate(every=2), estimate(precision="fp32")
    assert again.gpu["activations"] < 0.5 * plain.gpu["activations"]
    assert plain.gpu["activations"] < 0.75 * wide.gpu["activations"]


def test_activations_grow_with_the_batch():
    one, two = estimate(samples=8), estimate(samples=16)
    assert two.gpu["activations"] == pytest.approx(2 * one.gpu["activations"], rel=0.15)
