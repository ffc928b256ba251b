"""A streamed run that host memory cannot hold is refused in words, with nothing allocated."""

from __future__ import annotations

import mmap
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from hybridtrainer.cli import app
from hybridtrainer.config import RunConfig
from hybridtrainer.config_io import load_config, parse_config
from hybridtrainer.errors import MemoryBudgetError
from hybridtrainer.memory.arena import RESERVE_BYTES
from hybridtrainer.models.gpt import build_gpt
from hybridtrainer.planning.host_room import require_host_room

RECIPE = Path(__file__).parents[2] / "recipes" / "llama-7b-8gb.toml"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def leave(monkeypatch: pytest.MonkeyPatch, free_gib: float) -> None:
    memory = psutil.virtual_memory()._replace(available=int(free_gib * 2**30) + RESERVE_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def require(config: RunConfig, device: torch.device) -> None:
    model = build_gpt(config.model.name, context=config.model.context, vocabulary=256, device="meta")
    require_host_room(model, config, device)


def test_what_a_gpu_would_hold_counts_on_a_cpu(monkeypatch):
    config = load_config(RECIPE)
    leave(monkeypatch, 24)
    require(config, GPU)
    with pytest.raises(MemoryBudgetError, match=r"llama-7b with `sr4` takes 27\.\d+ GiB .* and 24\.00 GiB") as refused:
        require(config, CPU)
    assert "machine with a GPU" in refused.value.remedy
    leave(monkeypatch, 29)
    require(config, CPU)


def test_inputs_of_blocks_that_wait_in_host_memory_count(monkeypatch):
    config = load_config(RECIPE)
    leave(monkeypatch, 20)
    with pytest.raises(MemoryBudgetError, match=r"takes 22\.\d+ GiB of host memory, and 20\.00 GiB") as refused:
        require(config, GPU)
    assert "with a GPU" not in refused.value.remedy
    memory = config.memory.model_copy(update={"offload_activations": False})
    require(config.model_copy(update={"memory": memory}), GPU)


def test_an_average_of_the_weights_counts(monkeypatch):
    config = load_config(RECIPE)
    leave(monkeypatch, 40)
    require(config, GPU)
    averaged = config.model_copy(update={"readout": "averaged"})
    with pytest.raises(MemoryBudgetError, match=r"takes 70\.\d+ GiB of host memory") as refused:
        require(averaged, GPU)
    assert 'readout = "last"' in refused.value.remedy
    leave(monkeypatch, 72)
    require(averaged, GPU)


def test_a_budget_of_a_card_is_not_what_a_small_model_takes_on_a_cpu(monkeypatch):
    def is_refused(mode: str) -> bool:
        try:
            require(parse_config({"memory": {"mode": mode, "vram": "80GB"}}), CPU)
        except MemoryBudgetError:
            return True
        return False

    modes = ("fp32", "split8", "factored")
    leave(monkeypatch, 0.5)
    assert not any(map(is_refused, modes))
    leave(monkeypatch, 0.001)
    assert all(map(is_refused, modes))


def test_a_run_is_refused_before_any_memory_or_folder_is_taken(monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 20_000)
    leave(monkeypatch, 24)
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: pytest.fail("memory was allocated"))
    given = {"data.source": "text", "data.path": text, "train.device": "cpu", "run.folder": tmp_path / "runs"}
    settings = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(app, ["train", str(RECIPE), "--quiet", *settings])
    assert result.exit_code == 8 and "what a GPU would hold" in result.output
    assert not (tmp_path / "runs").exists()
