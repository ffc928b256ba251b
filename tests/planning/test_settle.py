"""Memory settings that are left out are planned before the run; what is said stays as said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtrainer.config import RunConfig
from hybridtrainer.config_io import parse_config
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ConfigError, MemoryBudgetError
from hybridtrainer.models.gpt import build_gpt, gpt_loss
from hybridtrainer.planning import settle
from hybridtrainer.planning.cards import BUILT_IN
from hybridtrainer.planning.estimate import PROCESS_BYTES
from hybridtrainer.planning.machine import Gpu
from hybridtrainer.planning.settle import settle_memory
from hybridtrainer.predict.averages import averages_of
from hybridtrainer.sizes import as_size

CPU = torch.device("cpu")


def settled(device: torch.device = CPU, **settings: Any) -> tuple[MemoryConfig, str]:
    config = parse_config({"train": {"batch_size": 4}, **settings})
    assert config.memory.mode == "auto"
    model = build_gpt(config.model.name, context=config.model.context, device="meta")
    resolved, planned = settle_memory(config, model, gpt_loss, device)
    assert isinstance(resolved, RunConfig)
    assert resolved.model_copy(update={"memory": config.memory}) == config
    return resolved.memory, planned.text


def test_what_fits_stays_resident_and_the_budget_is_not_left_over():
    memory, why = settled(memory={"vram": "2GB", "ram": "2GB"})
    assert memory == MemoryConfig()
    assert "planned: resident" in why and "2.00 GiB" in why and "next best" in why


def test_what_does_not_fit_is_streamed_within_the_budgets():
    memory, why = settled(memory={"vram": "0.075GB", "ram": "8GB"})
    assert (memory.mode, memory.vram, memory.ram) == ("split8", "0.07GB", "8GB")
    assert "planned: split8" in why


def test_on_a_cpu_activations_that_are_to_leave_leave_no_resident_way():
    memory, _ = settled(memory={"vram": "2GB", "offload_activations": True})
    assert memory.mode == "split8" and memory.offload_activations


@pytest.mark.slow
def test_on_a_cpu_there_is_nowhere_to_offload_to():
    for vram in ("0.2GB", "0.1GB", "0.09GB"):
        memory, _ = settled(memory={"vram": vram, "ram": "8GB"})
        assert memory.mode != "resident" or not memory.offload_activations


def test_what_is_said_stays_as_said():
    memory, _ = settled(memory={"vram": "2GB", "checkpoint_every": 3, "precision": "bf16"})
    assert (memory.mode, memory.checkpoint_every, memory.precision) == ("resident", 3, "bf16")
    memory, _ = settled(memory={"vram": "2GB", "checkpoint_keep": "by_phase"})
    assert (memory.mode, memory.checkpoint_every > 0, memory.checkpoint_keep) == ("resident", True, "by_phase")
    memory, _ = settled(memory={"vram": "2GB", "split": 3, "max_gpu_blocks": 2, "clipping": "exact"})
    assert (memory.mode, memory.split, memory.max_gpu_blocks, memory.clipping) == ("split8", 3, 2, "exact")


def test_other_settings_of_the_run_are_kept_to():
    for vram, words in (("0.005GB", "alone are more"), ("0.06GB", r"it needs \d+\.\d MiB")):
        with pytest.raises(MemoryBudgetError, match=f"resident model: .*{words}.*streamed one takes less"):
            settled(memory={"vram": vram}, optimizer={"name": "adam"})
    memory, _ = settled(memory={"vram": "0.1GB"}, optimizer={"name": "sgd"})
    assert memory.mode == "resident"


def test_nothing_fits():
    with pytest.raises(MemoryBudgetError, match="GPU memory are too little"):
        settled(memory={"vram": "0.01GB"})


def test_on_a_cpu_it_is_host_memory_that_is_short_if_the_budget_would_do():
    with pytest.raises(MemoryBudgetError, match=r"^Host memory of 1\.0\d GiB is too little: on a CPU ") as raised:
        settled(memory={"vram": "2GB", "ram": "1110MB"})
    assert "memory.ram" in raised.value.remedy and "GPU memory are too little" not in str(raised.value)
    needed = float(raised.value.what.split("the run needs ")[1].split(" GiB")[0])
    assert settled(memory={"vram": "2GB", "ram": f"{needed + 0.01:.2f}GB"})
    with pytest.raises(MemoryBudgetError, match="Host memory"):
        settled(memory={"vram": "2GB", "ram": f"{needed - 0.01:.2f}GB"})


def test_without_a_budget_and_a_gpu_there_is_nothing_to_plan_for():
    with pytest.raises(ConfigError, match=r"memory\.vram: is needed"):
        settled(memory={"mode": "auto"})
    with pytest.raises(ConfigError, match=r"memory\.vram: .*should be more than 0"):
        settled(memory={"vram": "0GB"})


def test_on_a_cpu_no_more_than_is_free_is_planned_for(monkeypatch):
    monkeypatch.setattr(settle, "free_host_bytes", lambda: 3 << 30)
    assert "in 3.00 GiB" in settled(memory={"vram": "80GB"})[1]
    with pytest.raises(MemoryBudgetError):
        settled(memory={"vram": "800GB"}, model={"name": "llama-7b"})


def test_on_a_gpu_its_memory_its_speeds_and_16_bits_are_taken(monkeypatch):
    card = BUILT_IN["rtx-4060"]
    monkeypatch.setattr(settle, "gpu_at_hand", lambda index: Gpu(card.name, index << 31))
    monkeypatch.setattr(settle, "speeds_at_hand", lambda name: card if name == card.name else None)
    gpu = torch.device("cuda", 1)
    memory, why = settled(gpu, memory={"mode": "auto"})
    assert (memory.mode, memory.precision) == ("resident", "bf16")
    assert " s a step" in why and "of CUDA's own in 2.00 GiB" in why
    assert "in 2.00 GiB" in settled(gpu, memory={"vram": "80GB"})[1]  # no more than there is


def test_what_was_chosen_is_kept_as_figures_for_the_end_of_the_run(monkeypatch):
    card, config = BUILT_IN["rtx-4060"], parse_config({"train": {"batch_size": 4}, "memory": {"vram": "2GB"}})
    model = build_gpt(config.model.name, context=config.model.context, device="meta")
    _, on_cpu = settle_memory(config, model, gpt_loss, CPU)
    assert on_cpu.gpu_bytes is None and on_cpu.host_bytes > PROCESS_BYTES
    assert on_cpu.why_no_seconds == "plans have seconds for GPUs only"
    monkeypatch.setattr(settle, "gpu_at_hand", lambda index: Gpu(card.name, 8 << 30))
    monkeypatch.setattr(settle, "speeds_at_hand", lambda name: card)
    _, on_gpu = settle_memory(config, model, gpt_loss, torch.device("cuda", 0))
    assert on_gpu.gpu_bytes is not None and as_size(on_gpu.gpu_bytes) in on_gpu.text
    assert on_gpu.seconds is not None and (on_gpu.why_no_seconds, on_gpu.speeds) == ("", card.origin)


@pytest.mark.parametrize(
    ("vram", "given", "expected"),
    [("4GB", {}, "auto"), ("2GB", {}, "last"), ("2GB", {"predict": "off"}, "auto"),
     ("2GB", {"readout": "averaged"}, "averaged")],
)  # fmt: skip
def test_averages_are_small_beside_the_budget_and_not_only_beside_the_card(monkeypatch, vram, given, expected):
    monkeypatch.setattr(settle, "gpu_at_hand", lambda index: Gpu("a card", 80 << 30))
    memory = {"vram": vram, "checkpoint_every": 0, "offload_activations": False}
    config = parse_config({"train": {"batch_size": 4}, "model": {"name": "mini"}, "memory": memory, **given})
    model = build_gpt("mini", device="meta")
    resolved, _ = settle_memory(config, model, gpt_loss, torch.device("cuda", 0))
    assert (resolved.memory.mode, resolved.readout) == ("resident", expected)
    run, planned = (averages_of(model, each, 80 << 30).copies for each in (resolved, config))
    assert run == (0 if expected == "last" else planned)


def test_averages_are_in_the_plan(monkeypatch):
    monkeypatch.setattr(settle, "free_host_bytes", lambda: 4 << 30)
    memory = {"vram": "2GB", "checkpoint_every": 0}
    choices: list[dict[str, Any]] = [{"readout": "last"}, {"predict": "off"}, {"readout": "averaged"}]
    told = [settled(memory=memory, **each)[1] for each in choices]
    assert told[0] == told[1] != told[2]


def test_on_a_cpu_both_budgets_are_of_one_memory(monkeypatch):
    """What was planned must not be refused afterwards for want of room."""
    monkeypatch.setattr(settle, "free_host_bytes", lambda: PROCESS_BYTES + (300 << 20))
    assert settled(memory={"vram": "2GB"})[0].mode == "resident"
    monkeypatch.setattr(settle, "free_host_bytes", lambda: PROCESS_BYTES + (10 << 20))
    with pytest.raises(MemoryBudgetError):
        settled(memory={"vram": "2GB"})
