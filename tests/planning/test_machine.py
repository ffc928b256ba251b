"""The machine at hand."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hybridtrainer.planning.machine import Gpu, free_host_bytes, gpu_at_hand


def test_a_gpu_has_its_name_and_memory(monkeypatch):
    card = SimpleNamespace(name="NVIDIA Something", total_memory=8 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    assert gpu_at_hand() == Gpu("NVIDIA Something", 8 << 30)


def test_without_cuda_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_at_hand() is None


def test_some_host_memory_is_free():
    assert free_host_bytes() > 1 << 26
