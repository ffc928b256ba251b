"""A package that is not there is named, with the extra that brings it, and the rest works."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybridtrainer.errors import HybridTrainerError, MissingPackageError
from hybridtrainer.integrations.optional import require


def test_a_missing_package_is_an_import_error_that_names_the_extra():
    with pytest.raises(MissingPackageError, match=r'pip install "\.\[lightning\]"') as caught:
        require("a_package_that_nobody_has", "lightning")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, HybridTrainerError)
    assert "a_package_that_nobody_has is not installed" in caught.value.what


def test_without_any_of_them_each_integration_says_what_to_install_and_the_rest_works(tmp_path):
    script = """
import importlib.abc, sys

class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "accelerate", "peft", "lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
from hybridtrainer.errors import MissingPackageError

def extra(action):
    try:
        action()
    except MissingPackageError as error:
        return error.remedy.split("[")[1].split("]")[0]
    return "nothing"

def trainer():
    from hybridtrainer.integrations.huggingface import Trainer

def callback():
    from hybridtrainer.integrations.huggingface_callback import HybridCallback

def lightning():
    from hybridtrainer.integrations.lightning import HybridStrategy

def pretrained():
    from hybridtrainer import MemoryConfig
    from hybridtrainer.integrations.huggingface_streamed import stream_pretrained
    stream_pretrained(".", MemoryConfig(mode="split8"), "cpu")

from hybridtrainer.integrations.huggingface import HybridTrainerMixin
sys.modules["transformers"] = object()  # installed, and accelerate is not
print(extra(trainer))
del sys.modules["transformers"]
print(extra(trainer), extra(HybridTrainerMixin), extra(callback), extra(lightning), extra(pretrained))
import torch
from hybridtrainer import HybridTrainer
from hybridtrainer.integrations.accelerate import from_accelerate
from hybridtrainer.integrations.own_loop import own_loop
model = torch.nn.Linear(2, 1)
run = HybridTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean())
print(run.step(torch.ones(3, 2)).step)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.split() == ["hf", "hf", "hf", "hf", "lightning", "hf", "1"], done.stderr
