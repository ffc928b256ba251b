"""Which arithmetic follows which signs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.phases.divergence import Watch
from hybridtrainer.phases.precision import CAREFUL_STEPS, careful_after, precision_at, trouble
from hybridtrainer.records import PrecisionChange
from hybridtrainer.trainer import HybridTrainer


@pytest.mark.parametrize("setting", ["fp32", "bf16", "fp16"])
def test_a_fixed_setting_is_never_left(setting):
    assert {precision_at(setting, steps) for steps in (0, 1, CAREFUL_STEPS)} == {setting}


def test_a_finding_or_a_suspicion_is_trouble_and_calm_is_not():
    assert trouble(Watch(), None) == ""
    assert trouble(Watch(), "loss is nan") == "loss is nan"
    assert "suspicious" in trouble(Watch(suspects=1), None)


def test_trouble_starts_the_careful_steps_anew_and_calm_uses_them_up():
    steps = careful_after(0, "loss is nan")
    assert steps == CAREFUL_STEPS
    steps = careful_after(steps, "")
    assert steps == CAREFUL_STEPS - 1
    assert careful_after(steps, "again") == CAREFUL_STEPS
    for _ in range(2 * CAREFUL_STEPS):
        steps = careful_after(steps, "")
    assert steps == 0 and precision_at("adaptive", steps) == "bf16"


def watched(setting: str) -> tuple[HybridTrainer, list[bool], list[PrecisionChange]]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    in_bf16: list[bool] = []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        in_bf16.append(torch.is_autocast_enabled("cpu"))
        out: Tensor = model(batch).float().square().mean(dim=1)
        return out

    config = HybridTrainerConfig(predict="off", memory=MemoryConfig.model_validate({"precision": setting}))
    trainer = HybridTrainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn, config)
    changes: list[PrecisionChange] = []
    trainer.listeners.append(lambda record: changes.append(record) if isinstance(record, PrecisionChange) else None)
    return trainer, in_bf16, changes


def batch(size: float = 1.0) -> Tensor:
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * size


def test_a_run_leaves_bf16_after_a_spike_and_returns_when_it_is_calm():
    trainer, in_bf16, changes = watched("adaptive")
    for step in range(70):
        trainer.step(batch(1.6 if step == 30 else 1.0))
    assert all(in_bf16[:31]) and not any(in_bf16[31 : 31 + CAREFUL_STEPS])
    assert all(in_bf16[31 + CAREFUL_STEPS :])
    assert [(change.step, change.before, change.after) for change in changes] == [
        (31, "bf16", "fp32"),
        (31 + CAREFUL_STEPS, "fp32", "bf16"),
    ]
    assert changes[0].reason and "without trouble" in changes[1].reason


def test_a_step_that_is_not_finite_is_followed_by_careful_ones():
    trainer, in_bf16, changes = watched("adaptive")
    trainer.step(batch(float("nan")))
    trainer.step(batch())
    assert in_bf16 == [True, False]
    assert "nan" in changes[0].reason


def test_a_run_resumed_among_careful_steps_goes_on_with_them(tmp_path):
    trainer, _, _ = watched("adaptive")
    for step in range(36):
        trainer.step(batch(1.6 if step == 30 else 1.0))
    trainer.save(tmp_path / "checkpoint")
    other, in_bf16, _ = watched("adaptive")
    other.load(tmp_path / "checkpoint")
    for each in (trainer, other):
        for _ in range(24):
            each.step(batch())
    assert in_bf16 == [False] * (CAREFUL_STEPS - 5) + [True] * 9
    assert trainer.fingerprint() == other.fingerprint()


def test_the_log_has_the_decision(tmp_path):
    trainer, _, _ = watched("adaptive")
    batches = [batch(1.6 if step == 30 else 1.0) for step in range(40)]
    trainer.fit(batches, steps=40, run_dir=tmp_path / "run", progress="off")
    found = [record for record in read_log(tmp_path / "run" / "log.jsonl") if record["kind"] == "precision"]
    assert [(record["step"], record["after"]) for record in found] == [(31, "fp32")]


@pytest.mark.parametrize("setting", ["fp32", "bf16"])
def test_fixed_arithmetic_ignores_a_spike(setting):
    trainer, in_bf16, changes = watched(setting)
    for step in range(40):
        trainer.step(batch(1.6 if step == 30 else 1.0))
    assert set(in_bf16) == {setting == "bf16"} and not changes
