"""The one entry to an update: the reference on a CPU, kernels on a GPU, and Triton only where it is needed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from tests.kernels.device import DEVICE
from tests.kernels.making import FORMATS, clones, gradients, hyper, no, one, parameter, same_bits, yes

from hybridtrainer.errors import ModelError
from hybridtrainer.kernels import adam, reference


@pytest.mark.parametrize("kind", FORMATS)
def test_on_a_cpu_an_update_is_the_reference(kind):
    mine, theirs = parameter(kind, (50, 100)), parameter(kind, (50, 100))
    for step in (1, 2):
        adam.update_(kind, *mine, gradients(5000, step), hyper(step), one(), yes())
        reference.update_(kind, *theirs, gradients(5000, step), hyper(step), one(), yes())
    assert same_bits(mine[0], theirs[0])
    assert all(same_bits(mine[1][name], theirs[1][name]) for name in theirs[1])


def test_fp32_on_a_device_is_torchs_adamw_in_pieces(monkeypatch):
    monkeypatch.setattr(adam, "FP32_PIECE_ELEMENTS", 1000)
    mine, theirs = parameter("fp32", (5000,), DEVICE), parameter("fp32", (5000,), DEVICE)
    for step in range(1, 6):
        gradient, half = gradients(5000, step, DEVICE), one(DEVICE) * 0.5
        adam.update_("fp32", *mine, gradient, hyper(step), half, yes(DEVICE), use_triton=True)
        reference.update_("fp32", *theirs, gradient, hyper(step), half, yes(DEVICE))
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-6, atol=1e-8)
    assert all(same_bits(mine[1][name], theirs[1][name]) for name in ("m", "v"))


def test_fp32_on_a_device_changes_no_bit_where_not_ok():
    weight, state = parameter("fp32", (5000,), DEVICE)
    adam.update_("fp32", weight, state, gradients(5000, 1, DEVICE), hyper(1), one(DEVICE), yes(DEVICE), use_triton=True)
    before, state_before = weight.clone(), clones(state)
    bad = torch.full((5000,), float("nan"), device=DEVICE)
    adam.update_("fp32", weight, state, bad, hyper(2), one(DEVICE), no(DEVICE), use_triton=True)
    assert same_bits(weight, before)
    assert all(same_bits(state[name], state_before[name]) for name in state)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_empty_parameter_needs_no_update(kind):
    weight, state = parameter(kind, (0, 4), DEVICE)
    before = {name: tensor.clone() for name, tensor in state.items()}
    for use_triton in (True, False):
        adam.update_(kind, weight, state, torch.empty(0, device=DEVICE), hyper(1), one(DEVICE), yes(DEVICE), use_triton)
    assert not weight.numel()
    assert all(torch.isfinite(state[name].float()).all() and state[name].shape == before[name].shape for name in state)


def test_a_gradient_may_have_the_shape_of_the_parameter():
    mine, theirs = parameter("sr8", (50, 100)), parameter("sr8", (50, 100))
    adam.update_("sr8", *mine, gradients(5000, 1).view(50, 100), hyper(1), one(), yes())
    adam.update_("sr8", *theirs, gradients(5000, 1), hyper(1), one(), yes())
    assert same_bits(mine[0], theirs[0])


def test_halves_of_a_key_have_32_bits_with_sign():
    assert adam._signed_halves(0) == (0, 0)
    assert adam._signed_halves(2**64 - 1) == (-1, -1)
    assert adam._signed_halves(0x80000000_7FFFFFFF) == (2**31 - 1, -(2**31))


def test_without_triton_kernels_say_what_to_install(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    with pytest.raises(ModelError, match=r"need Triton.*\.\[kernels\]"):
        adam.update_("sr8", *parameter("sr8", (64, 64)), gradients(4096, 1), hyper(1), one(), yes(), use_triton=True)


def test_all_modules_import_without_triton_and_an_update_on_a_cpu_does_not_import_it():
    script = """
import sys, importlib
import torch
from hybridtrainer.kernels import adam
from tests.kernels.making import gradients, hyper, one, parameter, yes
adam.update_("sr4", *parameter("sr4", (64, 64)), gradients(4096, 1), hyper(1), one(), yes())
assert "triton" not in sys.modules
sys.modules["triton"] = None
import hybridtrainer.kernels.passes, hybridtrainer.kernels.quant
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr
