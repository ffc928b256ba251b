"""Accelerate's loop with HybridTrainer in it: off it is the plain one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.making import ALL_PHASES, same, weights
from tests.support import gpt_setup
from torch.utils.data import DataLoader

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.integrations.accelerate import from_accelerate

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


def prepared(**options: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it is the same for all of a process
    accelerator = accelerate.Accelerator(cpu=True, **options)
    setup = gpt_setup(count=40)
    scheduler = torch.optim.lr_scheduler.LinearLR(setup.optimizer, 1.0, 0.5, 30)
    batches: Any = setup.batches
    loader: Any = DataLoader(batches, batch_size=None)
    parts = accelerator.prepare(setup.model, setup.optimizer, loader, scheduler)
    return accelerator, setup, *parts


def mean_loss(setup: Any) -> Any:
    return lambda model, batch: setup.loss_fn(model, batch).mean()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_off_it_is_the_plain_loop_bit_for_bit(precision):
    accelerator, setup, model, optimizer, loader, scheduler = prepared(mixed_precision=precision)
    torch.manual_seed(3)
    for batch in loader:
        loss = mean_loss(setup)(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    plain = weights(model)
    accelerator, setup, model, optimizer, loader, scheduler = prepared(mixed_precision=precision)
    off = HybridTrainerConfig(predict="off")
    trainer = from_accelerate(accelerator, model, optimizer, mean_loss(setup), off, scheduler, clip_norm=0.5)
    torch.manual_seed(3)
    for batch in loader:
        trainer.step(batch)
    assert same(plain, weights(model))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.5e-3)


def test_on_it_jumps():
    accelerator, setup, model, optimizer, loader, scheduler = prepared()
    config = HybridTrainerConfig(**ALL_PHASES)
    trainer = from_accelerate(accelerator, model, optimizer, mean_loss(setup), config, scheduler)
    phases = {trainer.step(batch).phase.value for batch in loader}
    assert phases == {"warmup", "full", "predict", "correct"}


def test_what_it_cannot_follow_is_refused():
    accelerator, setup, model, optimizer, _, _ = prepared()
    with pytest.raises(ModelError, match="Accelerate chooses the precision"):
        from_accelerate(
            accelerator, model, optimizer, setup.loss_fn, HybridTrainerConfig(memory=MemoryConfig(precision="bf16"))
        )
    two = SimpleNamespace(num_processes=2)
    with pytest.raises(ModelError, match="2 processes"):
        from_accelerate(two, model, optimizer, setup.loss_fn)
