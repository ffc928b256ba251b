"""Runs can be repeated: the first parallel call into the math library is never the first call."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.support import gpt_setup

from hybridtrainer import determinism

SCRIPT = """
import torch
from hybridtrainer.determinism import settle_vector_math
torch.set_num_threads(2)
if SETTLED:
    settle_vector_math()
x = torch.rand(32768, generator=torch.Generator().manual_seed(0)) * 1e-8 + 1e-12
for _ in range(20):
    y = (x + 1) * 2  # both threads are awake
first = x.sqrt()
print(bool(torch.equal(first, x.sqrt())))
"""


def test_the_math_library_is_settled_before_a_trainer_computes_anything(monkeypatch):
    called: list[str] = []
    for name in ("sqrt", "exp", "log", "tanh", "erf", "sin", "cos"):
        monkeypatch.setattr(torch, name, lambda x, name=name: called.append(f"{name} {x.numel()}"))
    determinism.settle_vector_math()
    assert called == ["sqrt 1", "exp 1", "log 1", "tanh 1", "erf 1", "sin 1", "cos 1"]
    monkeypatch.undo()
    settled: list[bool] = []
    monkeypatch.setattr("hybridtrainer.trainer.settle_vector_math", lambda: settled.append(True))
    gpt_setup().trainer()
    assert settled == [True]


@pytest.mark.slow
def test_the_first_square_root_is_right_in_forty_processes():
    script = SCRIPT.replace("SETTLED", "True")
    answers = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(40)
    ]
    assert answers == ["True"] * 40
