"""Who moves a host's scheduler, and when."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hybridtrainer.integrations.clock import HostScheduler, Idle, unwrapped
from hybridtrainer.schedule import look_ahead


def halving() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_what_is_idle_does_everything_but_step():
    optimizer, scheduler = halving()
    idle = Idle(scheduler)
    idle.step()
    assert idle.get_last_lr() == [1.0]
    assert unwrapped(idle) is scheduler
    assert unwrapped(optimizer) is optimizer
    assert isinstance(copy.copy(idle), Idle)
    with pytest.raises(AttributeError):
        _ = idle.nothing


def test_a_scheduler_moves_and_is_put_back():
    optimizer, scheduler = halving()
    clock = HostScheduler(scheduler)
    before = clock.state_dict()
    clock.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    clock.load_state_dict(before)
    assert scheduler.last_epoch == 0


def test_one_that_waits_for_metrics_is_only_put_back():
    optimizer, scheduler = halving()
    HostScheduler(scheduler, moves=False).step()
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_withheld_update_does_not_move_it_and_looking_ahead_does_not_mind():
    optimizer, scheduler = halving()
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    clock = HostScheduler(scheduler, scaler=scaler)
    clock.before_step()
    scaler.update(2.0)  # as after an overflow
    clock.step()
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert look_ahead(optimizer, clock, 2) == [1.5]
    clock.before_step()
    clock.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
