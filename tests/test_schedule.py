"""The learning-rate clock: looking ahead sums what will be, and moves nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from hybridtrainer.schedule import advance, learning_rates, look_ahead, rates_ahead, share_left
from hybridtrainer.tree import fingerprint

MAKERS: dict[str, Any] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 50),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=12),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [5, 8, 12], 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 1 / (1 + step), lambda step: 0.9**step]),
    "multiplied": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 30),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=60),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=6), lr_scheduler.CosineAnnealingLR(o, 30)], [6]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=6), lr_scheduler.ExponentialLR(o, 0.95)]
    ),
}


def make(name: str | None, tensor_rate: bool = False) -> tuple[Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    rates: list[Any] = [0.1, 0.02]
    if tensor_rate:
        rates = [torch.tensor(rate) for rate in rates]
    groups = [{"params": [model.weight], "lr": rates[0]}, {"params": [model.bias], "lr": rates[1], "momentum": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer, None if name is None else MAKERS[name](optimizer)


def run(optimizer: Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        rates.append(learning_rates(optimizer))
        optimizer.step()
        advance(scheduler, 1, 0.0)
    return rates


def everything(optimizer: Optimizer, scheduler: Any) -> dict[str, str]:
    return fingerprint({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("done", [1, 4, 9])
def test_looking_ahead_sums_the_rates_that_follow_and_leaves_no_trace(name, done):
    optimizer, scheduler = make(name)
    run(optimizer, scheduler, done)
    before = everything(optimizer, scheduler)
    ahead = look_ahead(optimizer, scheduler, 15)
    assert everything(optimizer, scheduler) == before
    following = run(optimizer, scheduler, 15)
    assert ahead == pytest.approx([sum(rates) for rates in zip(*following, strict=True)], rel=1e-12)
    # and what follows is what would have followed without looking
    other = make(name)
    assert run(*other, done + 15)[done:] == following


@pytest.mark.parametrize("name", ["cosine", "sequential", "exponential", "lambda"])
def test_rates_that_are_tensors_stay_the_same_tensors(name):
    optimizer, scheduler = make(name, tensor_rate=True)
    run(optimizer, scheduler, 3)
    held = [group["lr"] for group in optimizer.param_groups]
    values = [rate.clone() for rate in held]
    ahead = look_ahead(optimizer, scheduler, 10)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, held, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held, values, strict=True))
    following = run(optimizer, scheduler, 10)
    assert ahead == pytest.approx([sum(rates) for rates in zip(*following, strict=True)], rel=1e-5)


def test_without_a_scheduler_the_rate_stays():
    optimizer, _ = make(None)
    assert look_ahead(optimizer, None, 7) == pytest.approx([0.7, 0.14])
    assert look_ahead(optimizer, None, 0) == [0.0, 0.0]


def test_a_scheduler_that_waits_for_losses_is_not_run_ahead():
    optimizer, _ = make(None)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    before = fingerprint({"scheduler": scheduler.state_dict()})
    assert look_ahead(optimizer, scheduler, 5) == pytest.approx([0.5, 0.1])
    assert fingerprint({"scheduler": scheduler.state_dict()}) == before


def test_a_schedule_that_ends_before_the_horizon_gives_none_and_no_trace():
    optimizer, _ = make(None)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    run(optimizer, scheduler, 10)
    before = everything(optimizer, scheduler)
    assert look_ahead(optimizer, scheduler, 9) is not None
    assert look_ahead(optimizer, scheduler, 15) is None
    assert everything(optimizer, scheduler) == before
    assert len(run(optimizer, scheduler, 9)) == 9


def test_an_error_of_the_scheduler_arrives_and_the_clock_is_put_back():
    optimizer, _ = make(None)

    def rate(step: int) -> float:
        if step > 6:
            raise ZeroDivisionError
        return 0.9**step

    scheduler = lr_scheduler.LambdaLR(optimizer, rate)
    run(optimizer, scheduler, 3)
    before = everything(optimizer, scheduler)
    with pytest.raises(ZeroDivisionError):
        look_ahead(optimizer, scheduler, 10)
    assert everything(optimizer, scheduler) == before


def test_a_scheduler_that_keeps_its_clock_in_a_tensor_is_put_back():
    optimizer, _ = make(None)

    class Own:
        def __init__(self) -> None:
            self.clock = torch.zeros(1)

        def step(self) -> None:
            self.clock += 1
            optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** float(self.clock)

        def state_dict(self) -> dict[str, Any]:
            return {"clock": self.clock}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.clock.copy_(state["clock"])

    scheduler = Own()
    scheduler.step()
    ahead = look_ahead(optimizer, scheduler, 3)
    assert ahead == pytest.approx([0.05 + 0.025 + 0.0125, 3 * 0.02])
    assert scheduler.clock.item() == 1
    assert learning_rates(optimizer) == [0.05, 0.02]


def test_advancing_by_many_equals_advancing_one_by_one():
    optimizer, scheduler = make("sequential")
    optimizer.step()
    advance(scheduler, 13, 0.0)
    other, expected = make("sequential")
    run(other, expected, 13)
    assert learning_rates(optimizer) == learning_rates(other)
    assert scheduler.last_epoch == expected.last_epoch == 13


def test_a_scheduler_that_watches_the_loss_is_shown_it_once():
    optimizer, _ = make(None)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    advance(scheduler, 5, 3.25)
    assert scheduler.last_epoch == 1
    assert scheduler.best == 3.25


def test_advancing_nothing_does_nothing():
    advance(None, 3, 1.0)
    optimizer, scheduler = make("cosine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advance(scheduler, 0, 1.0)
    assert scheduler.last_epoch == 0
    assert learning_rates(optimizer) == [0.1, 0.02]


@pytest.mark.parametrize("name", MAKERS)
def test_the_share_left_is_that_of_the_rates_to_come_and_nothing_moves(name):
    optimizer, scheduler = make(name)
    before = everything(optimizer, scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none about steps in the wrong order
        found = share_left(optimizer, scheduler, 25)
    assert everything(optimizer, scheduler) == before
    rates = list(zip(*run(*make(name), 25), strict=True))
    peaks = [max(index for index, rate in enumerate(group) if rate == max(group)) for group in rates]
    shares = [min(group[peak:]) / group[peak] for group, peak in zip(rates, peaks, strict=True)]
    assert found == pytest.approx(min(shares))


def test_the_share_left_of_a_rate_that_stays_is_all_of_it():
    optimizer, _ = make(None)
    assert share_left(optimizer, None, 100) == 1
    assert share_left(optimizer, lr_scheduler.ReduceLROnPlateau(optimizer), 100) == 1
    assert share_left(optimizer, lr_scheduler.LinearLR(optimizer, 0.01, total_iters=10), 100) == 1


def test_a_schedule_that_ends_before_the_run_counts_up_to_its_end():
    optimizer, scheduler = make("one cycle")
    assert share_left(optimizer, scheduler, 1000) < 0.01


def test_a_very_long_run_is_looked_at_in_no_time_where_nothing_falls():
    optimizer, _ = make(None)
    assert share_left(optimizer, None, 10**12) == 1


def test_rates_ahead_are_those_of_the_first_group_and_leave_no_trace():
    optimizer, scheduler = make(None)
    assert rates_ahead(optimizer, None, 3) == [learning_rates(optimizer)[0]] * 3
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    now, before = learning_rates(optimizer)[0], everything(optimizer, scheduler)
    assert rates_ahead(optimizer, scheduler, 3) == pytest.approx([now, now / 2, now / 4])
    assert everything(optimizer, scheduler) == before


def test_beyond_the_end_of_a_schedule_the_last_rate_stays():
    optimizer, _ = make(None)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    found = rates_ahead(optimizer, scheduler, 9)
    assert len(found) == 9
    assert len(set(found[4:])) == 1
