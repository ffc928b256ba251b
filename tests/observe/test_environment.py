"""What this machine is: plain values, and checks that say what follows."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import resource
import shutil
from collections import namedtuple
from types import SimpleNamespace

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
    assert "triton" in found["packages"]


def test_a_diagnosis_looks_at_everything_and_says_what_it_found(tmp_path):
    found = rows(tmp_path)
    always = {"Python", "torch", "processors", "memory", "locked memory", "disk", "run folder", "NVML", "GPU"}
    assert always | set(EXTRAS) == set(found)
    assert all(follows for _, follows in found.values())
    assert found["run folder"] == (True, f"{tmp_path} can be written")
    assert found["GPU"][0] is torch.cuda.is_available()


def test_a_missing_package_is_named_with_how_to_get_it(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokenizers" else real(name))
    well, follows = rows(tmp_path)["tokenizers"]
    assert not well
    assert "not installed" in follows and ".[bpe]" in follows


def test_a_full_disk_and_a_read_only_folder_are_not_well(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2**40, 2**40, 2**20))
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    found = rows(tmp_path)
    assert found["disk"][0] is False and "free some" in found["disk"][1]
    assert found["run folder"] == (False, f"{tmp_path} cannot be written; set run.folder to one that can")


@pytest.mark.parametrize(("limit", "well"), [(resource.RLIM_INFINITY, True), (1 << 60, True), (8 << 20, False)])
def test_a_limit_of_locked_memory_is_told_with_how_to_raise_it(tmp_path, monkeypatch, limit, well):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    found = rows(tmp_path)["locked memory"]
    assert found[0] is well
    assert ("ulimit -l unlimited" in found[1]) is not well


@pytest.mark.parametrize(("code", "well"), [(0, True), (9, False), (None, False)])
def test_nvml_is_there_if_it_can_be_started(tmp_path, monkeypatch, code, well):
    def load(name: str) -> SimpleNamespace:
        if code is None:
            raise OSError("no such file")
        return SimpleNamespace(nvmlInit_v2=lambda: code)

    monkeypatch.setattr(ctypes, "CDLL", load)
    found = rows(tmp_path)["NVML"]
    assert found[0] is well
    assert ("driver" in found[1]) is not well


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_trains_on_the_cpu(tmp_path):
    well, told = rows(tmp_path)["GPU"]
    assert not well and "training runs on the CPU" in told and "driver" in told


def test_a_folder_that_is_not_there_is_a_finding_and_no_crash(tmp_path):
    assert rows(tmp_path / "nowhere")["run folder"][0] is False
