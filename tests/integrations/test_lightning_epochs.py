"""Epochs that are left before their end make a run shorter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hybridtrainer.integrations.lightning_epochs import LeftOut


def trainer_of(max_epochs: int | None, every: int = 1) -> Any:
    progress = SimpleNamespace(current=SimpleNamespace(started=0), is_last_batch=False)
    loop = SimpleNamespace(max_epochs=max_epochs, epoch_loop=SimpleNamespace(batch_progress=progress))
    return SimpleNamespace(fit_loop=loop, num_training_batches=20, accumulate_grad_batches=every, current_epoch=0)


def leave(trainer: Any, epoch: int, started: int, is_last: bool = True) -> None:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    trainer.current_epoch, progress.current.started, progress.is_last_batch = epoch, started, is_last


def test_what_is_left_out_is_counted_once_and_outlives_a_checkpoint():
    trainer = trainer_of(3)
    found = LeftOut(trainer, None)
    assert found.end(60) == 60
    leave(trainer, 0, 5, is_last=False)  # a validation in the middle
    assert not found.note()
    leave(trainer, 0, 5)
    assert (found.note(), found.note(), found.end(60)) == (True, False, 45)
    resumed = LeftOut(trainer, found.state())
    assert (resumed.note(), resumed.end(60)) == (False, 45)
    leave(trainer, 1, 20)
    assert not resumed.note()
    leave(trainer, 2, 0)
    assert (resumed.note(), resumed.end(60), resumed.end(12)) == (True, 25, 12)


def test_batches_of_a_step_that_is_not_whole_are_left_out_too():
    trainer = trainer_of(3, every=3)
    found = LeftOut(trainer, None)
    leave(trainer, 0, 5)
    assert (found.note(), found.end(21)) == (True, 21 - 6)


def test_a_run_of_steps_makes_them_in_as_many_epochs_as_it_takes():
    trainer = trainer_of(-1)
    found = LeftOut(trainer, None)
    leave(trainer, 0, 5)
    assert (found.note(), found.end(60)) == (True, 60)
