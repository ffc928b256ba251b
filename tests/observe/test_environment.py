"""What this machine is: plain values, and checks that say what follows."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
from collections import namedtuple

import pytest
import torch

import hybridtrainer
from hybridtrainer.observe.environment import EXTRAS, diagnose, environment


def rows(folder) -> dict[str, tuple[bool, str]]:
    return {what: (well, follows) for what, well, follows in diagnose(folder)}


def test_the_environment_is_plain_values_that_are_true():
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["hybridtrainer"] == hybridtrainer.__version__
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["memory_bytes"] > 2**28
    assert len(found["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert set(found["packages"]) == set(EXTRAS)
    assert found["packages"]["numpy"] == __import__("numpy").__version__


def test_a_diagnosis_looks_at_everything_and_says_what_it_found(tmp_path):
    found = rows(tmp_path)
    assert {"Python", "torch", "processors", "memory", "disk", "run folder", "GPU", *EXTRAS} == set(found)
    assert all(follows for _, follows in found.values())
    assert found["run folder"] == (True, f"{tmp_path} can be written")
    assert found["numpy"][0] is True
    assert found["GPU"][0] is torch.cuda.is_available()


def test_a_missing_package_is_named_with_how_to_get_it(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokenizers" else real(name))
    well, follows = rows(tmp_path)["tokenizers"]
    assert not well
    assert "not installed" in follows and "hybridtrainer[bpe]" in follows


def test_a_full_disk_and_a_read_only_folder_are_not_well(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**40, 2**40, 2**20))
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    found = rows(tmp_path)
    assert found["disk"][0] is False
    assert found["run folder"] == (False, f"{tmp_path} cannot be written")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_trains_on_the_cpu(tmp_path):
    assert rows(tmp_path)["GPU"] == (False, "none found by torch: training runs on the CPU")


def test_a_folder_that_is_not_there_is_a_finding_and_no_crash(tmp_path):
    assert rows(tmp_path / "nowhere")["run folder"][0] is False
