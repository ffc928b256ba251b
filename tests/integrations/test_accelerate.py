"""Accelerate's loop with HybridTrainer in it: off it is the plain one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.making import ALL_PHASES, PHASES, log_of, phases_in, same, timeless, weights
from tests.support import gpt_setup
from torch.utils.data import DataLoader

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.integrations.accelerate import from_accelerate
from hybridtrainer.integrations.own_loop import own_loop
from hybridtrainer.report.page import write_report
from hybridtrainer.trainer import HybridTrainer

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


def prepared(count: int = 200, dropout: float = 0.1, **options: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it is the same for all of a process
    accelerator = accelerate.Accelerator(cpu=True, **options)
    setup = gpt_setup(count=count, dropout=dropout)
    scheduler = torch.optim.lr_scheduler.LinearLR(setup.optimizer, 1.0, 0.6, 30)
    batches: Any = setup.batches
    loader: Any = DataLoader(batches, batch_size=None)
    parts = accelerator.prepare(setup.model, setup.optimizer, loader, scheduler)
    return accelerator, setup, *parts


def mean_loss(setup: Any) -> Any:
    return lambda model, batch: setup.loss_fn(model, batch).mean()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_off_it_is_the_plain_loop_bit_for_bit(precision):
    count = 200 if precision == "no" else 40
    accelerator, setup, model, optimizer, loader, scheduler = prepared(count, mixed_precision=precision)
    torch.manual_seed(3)
    for batch in loader:
        loss = mean_loss(setup)(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    plain = weights(model)
    accelerator, setup, model, optimizer, loader, scheduler = prepared(count, mixed_precision=precision)
    off = HybridTrainerConfig(predict="off")
    trainer = from_accelerate(accelerator, model, optimizer, mean_loss(setup), off, scheduler, clip_norm=0.5)
    torch.manual_seed(3)
    for batch in loader:
        trainer.step(batch)
    assert same(plain, weights(model))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.8e-3)


ON = HybridTrainerConfig(**ALL_PHASES)


@pytest.mark.slow
def test_two_hundred_steps_visit_all_phases_and_are_those_of_the_native_loop(tmp_path):
    # Without dropout: a prepared loader draws numbers of its own.
    accelerator, setup, model, optimizer, loader, scheduler = prepared(dropout=0.0)
    trainer = from_accelerate(accelerator, model, optimizer, mean_loss(setup), ON, scheduler, clip_norm=0.5)
    with own_loop(trainer, 200, tmp_path / "accelerate") as run:
        for batch in loader:
            run.step(batch)
            if not run.left:
                break
    other = gpt_setup(dropout=0.0)
    clock = torch.optim.lr_scheduler.LinearLR(other.optimizer, 1.0, 0.6, 30)
    native = HybridTrainer(other.model, other.optimizer, mean_loss(other), ON, clock, clip_norm=0.5)
    native.fit(other.batches, 200, run_dir=tmp_path / "native", progress="off")
    ours, theirs = log_of(tmp_path / "accelerate"), log_of(tmp_path / "native")
    assert phases_in(ours) == PHASES
    kinds = ("step", "jump", "phase", "notice", "forecast", "checkpoint")
    assert timeless(ours, *kinds) == timeless(theirs, *kinds)
    assert {record["kind"] for record in ours} == {record["kind"] for record in theirs}
    assert same(weights(model), weights(other.model))
    write_report([tmp_path / "accelerate"], tmp_path / "report.html")


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_run_resumed_from_any_phase_is_the_uninterrupted_one(tmp_path, precision):
    accelerator, setup, model, optimizer, loader, scheduler = prepared(80, mixed_precision=precision)
    whole = from_accelerate(accelerator, model, optimizer, mean_loss(setup), ON, scheduler)
    batches, saved = list(loader), {}
    for number, batch in enumerate(batches):
        if str(whole.current_phase) not in saved and number > 3:
            whole.save(tmp_path / str(number))
            saved[str(whole.current_phase)] = number
        whole.step(batch)
    assert saved.keys() == PHASES
    for number in saved.values():
        accelerator, setup, model, optimizer, _, scheduler = prepared(1, mixed_precision=precision)
        again = from_accelerate(accelerator, model, optimizer, mean_loss(setup), ON, scheduler)
        again.load(tmp_path / str(number))
        for batch in batches[number:]:
            again.step(batch)
        assert again.fingerprint() == whole.fingerprint(), number


def test_what_it_cannot_follow_is_refused():
    accelerator, setup, model, optimizer, _, _ = prepared()
    with pytest.raises(ModelError, match="Accelerate chooses the precision"):
        from_accelerate(
            accelerator, model, optimizer, setup.loss_fn, HybridTrainerConfig(memory=MemoryConfig(precision="bf16"))
        )
    two = SimpleNamespace(num_processes=2)
    with pytest.raises(ModelError, match="2 processes"):
        from_accelerate(two, model, optimizer, setup.loss_fn)
