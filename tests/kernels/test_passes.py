"""Every Triton pass equals its reference, and compiles for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.kernels.device import DEVICE
from tests.kernels.making import FORMATS, clones, gradients, hyper, no, one, parameter, same_bits, yes
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtrainer.kernels import adam, reference
from hybridtrainer.kernels.formats import CODES
from hybridtrainer.kernels.rounding import unpack

pytest.importorskip("triton", reason="the kernels need Triton")

KERNEL_FORMATS = FORMATS[1:]


def assert_alike(kind, mine, theirs):
    """Equal up to the last bits of fp32, which now and then decide between two neighbouring codes or bf16."""
    (weight, state), (their_weight, their_state) = mine, theirs
    few = max(1, len(weight) // 200)
    if "low" in state or weight.dtype == torch.float32:
        torch.testing.assert_close(
            reference.read(kind, weight, state), reference.read(kind, their_weight, their_state), rtol=1e-5, atol=1e-7
        )
    else:
        bits, their_bits = (one.view(torch.int16).to(torch.int32) for one in (weight, their_weight))
        assert int((bits - their_bits).abs().max()) <= 1 and int((bits != their_bits).sum()) <= few
    for name in state:
        if state[name].dtype == torch.float32:
            atol = 1e-9 if name == "m" else 1e-30  # a first moment may be a small difference of large numbers
            torch.testing.assert_close(state[name], their_state[name], rtol=1e-5, atol=atol)
        elif name != "low":
            codes, their_codes = (one[name].to(torch.int32) for one in (state, their_state))
            if CODES[kind].bits == 4:
                codes, their_codes = (unpack(one[name], len(weight), name == "m") for one in (state, their_state))
            assert int((codes - their_codes).abs().max()) <= 1 and int((codes != their_codes).sum()) <= few


@pytest.mark.parametrize("kind", KERNEL_FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 85), (16, 16), (1, 257), (50, 100), (3, 1500)], ids=str)
def test_a_pass_is_the_reference_in_each_of_five_steps(kind, shape):
    weight, state = parameter(kind, shape, DEVICE)
    for step in range(1, 6):
        gradient = gradients(len(weight), step, DEVICE, torch.bfloat16 if step % 2 else torch.float32)
        theirs = weight.clone(), clones(state)
        settings, scale, ok = hyper(step), one(DEVICE) * 0.5, yes(DEVICE)
        reference.update_(kind, *theirs, gradient, settings, scale, ok)
        adam.update_(kind, weight, state, gradient, settings, scale, ok, use_triton=True)
        assert_alike(kind, (weight, state), theirs)


@pytest.mark.parametrize("kind", KERNEL_FORMATS)
def test_where_not_ok_a_pass_changes_no_bit(kind):
    weight, state = parameter(kind, (50, 100), DEVICE)
    adam.update_(kind, weight, state, gradients(5000, 1, DEVICE), hyper(1), one(DEVICE), yes(DEVICE), use_triton=True)
    before, state_before = weight.clone(), clones(state)
    bad = torch.full((5000,), float("nan"), device=DEVICE)
    adam.update_(kind, weight, state, bad, hyper(2), one(DEVICE) * float("inf"), no(DEVICE), use_triton=True)
    assert same_bits(weight, before)
    assert all(same_bits(state[name], state_before[name]) for name in state)


@pytest.mark.parametrize("kind", KERNEL_FORMATS)
def test_a_pass_writes_nothing_beyond_its_tensors(kind):
    weight, state = parameter(kind, (1, 257), DEVICE)
    guarded = {}
    for name, tensor in {"weight": weight, **state}.items():
        room = torch.zeros(len(tensor) + 2048, dtype=tensor.dtype, device=DEVICE)
        room[: len(tensor)] = tensor
        guarded[name] = room
    views = {
        name: room[: len(tensor)]
        for (name, room), tensor in zip(guarded.items(), [weight, *state.values()], strict=True)
    }
    held = {name: views[name] for name in state}
    adam.update_(
        kind, views["weight"], held, gradients(257, 1, DEVICE), hyper(1), one(DEVICE), yes(DEVICE), use_triton=True
    )
    assert not same_bits(views["weight"], weight)
    assert all(not room[len(views[name]) :].any() for name, room in guarded.items())


# One strip and several, across and down, that end with the matrix or beyond it.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 5000), (5000, 1), (9000, 3), (64, 256), (33, 257), (257, 33), (512, 768), (513, 769)], ids=str
)
def test_sums_of_squares_are_those_of_every_row_and_column(shape, dtype):
    gradient = gradients(shape[0] * shape[1], 1, DEVICE, dtype)
    exact = gradient.view(shape).double()
    for mine, dim in zip(adam._norms(gradient, *shape), (1, 0), strict=True):
        torch.testing.assert_close(mine, exact.norm(dim=dim).float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_is_in_the_sums_of_its_row_and_column_alone(bad):
    gradient = gradients(300 * 520, 1, DEVICE)
    gradient[299 * 520 + 517] = bad
    by_row, by_column = adam._norms(gradient, 300, 520)
    assert (~by_row.isfinite()).nonzero().tolist() == [[299]]
    assert (~by_column.isfinite()).nonzero().tolist() == [[517]]
    torch.testing.assert_close(torch.stack([by_row[299], by_column[517]]).tolist(), [bad, bad], equal_nan=True)


class Readers(TorchDispatchMode):
    """Which operators of torch were given a tensor of so many elements, and how much memory was asked for."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.names: set[str] = set()
        self.made_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(one, torch.Tensor) and one.numel() == self.elements for one in args):
            self.names.add(func._schema.name)
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::empty":
            self.made_bytes += out.nbytes
        return out


def test_a_factored_update_reads_the_gradient_in_its_passes_alone():
    weight, state = parameter("factored", (512, 1024), DEVICE)
    gradient, settings = gradients(len(weight), 1, DEVICE), (hyper(1), one(DEVICE), yes(DEVICE))
    with Readers(len(weight)) as reference_readers:
        reference.update_("factored", weight, state, gradient, *settings)
    with Readers(len(weight)) as readers:
        adam.update_("factored", weight, state, gradient, *settings, use_triton=True)
    assert "aten::linalg_vector_norm" in reference_readers.names
    assert readers.names <= {"aten::view", "aten::new_empty"}  # the interpreter's; neither reads a number
    assert readers.made_bytes <= gradient.nbytes // 50


@pytest.mark.slow
def test_every_pass_compiles_for_a_gpu(tmp_path):
    # The interpreter accepts more than the compiler does.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    driver = Path(__file__).parent / "compile_driver.py"
    done = subprocess.run([sys.executable, driver], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *FORMATS[1:-1], "square_sums_pass", "factored_square_pass", "factored_pass", "feature_pass", "rollout_pass",
        "rollout_pass", "pack_pass", "unpack_pass", "count_pass",
    ]  # fmt: skip
