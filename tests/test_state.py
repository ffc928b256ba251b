"""Capturing and restoring what a training step changes."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from tests.support import gpt_setup, make_optimizer
from torch import nn
from torch.optim import lr_scheduler

from hybridtrainer.errors import ForeignCheckpointError
from hybridtrainer.predict.rollback import Snapshot
from hybridtrainer.state import Training, capture, require_fits, require_same, restore, signature
from hybridtrainer.tree import fingerprint

OPTIMIZERS = ["sgd", "momentum", "adam", "adamw", "adafactor", "rmsprop", "adagrad", "nadam", "adamax", "radam"]


def train(training: Training, loss_fn: Any, batches: list[Any]) -> None:
    for batch in batches:
        loss_fn(training.model, batch).mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        if training.scheduler is not None:
            training.scheduler.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_restored_to_the_bit_and_has_the_same_future(optimizer):
    setup = gpt_setup(optimizer)
    training = Training(setup.model, setup.optimizer, None, None)
    train(training, setup.loss_fn, setup.batches[:4])
    snapshot = Snapshot()
    snapshot.take(capture(training))
    before = fingerprint(capture(training))
    train(training, setup.loss_fn, setup.batches[4:8])
    future = fingerprint(capture(training))
    assert future != before
    restore(training, snapshot.tree())
    assert fingerprint(capture(training)) == before
    train(training, setup.loss_fn, setup.batches[4:8])
    assert fingerprint(capture(training)) == future


def test_returning_to_before_the_first_step_empties_the_optimizer():
    setup = gpt_setup()
    training = Training(setup.model, setup.optimizer, None, None)
    snapshot = Snapshot()
    snapshot.take(capture(training))
    before = fingerprint(capture(training))
    train(training, setup.loss_fn, setup.batches[:2])
    restore(training, snapshot.tree())
    assert fingerprint(capture(training)) == before


SCHEDULERS: dict[str, Any] = {
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5]),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=3, cycle_momentum=False),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=50),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 20),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_every_scheduler_is_restored_and_has_the_same_future(name):
    setup = gpt_setup("momentum")
    training = Training(setup.model, setup.optimizer, SCHEDULERS[name](setup.optimizer), None)
    train(training, setup.loss_fn, setup.batches[:4])
    snapshot = Snapshot()
    snapshot.take(capture(training))
    train(training, setup.loss_fn, setup.batches[4:8])
    future = [group["lr"] for group in setup.optimizer.param_groups], fingerprint(capture(training))
    restore(training, snapshot.tree())
    train(training, setup.loss_fn, setup.batches[4:8])
    assert ([group["lr"] for group in setup.optimizer.param_groups], fingerprint(capture(training))) == future


def test_moments_kept_in_another_type_than_the_weights_get_their_bits_back():
    def build() -> Training:
        torch.manual_seed(0)
        model = nn.Linear(6, 3).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(torch.ones(2, 6).bfloat16()).sum().backward()
        optimizer.step()
        for values in optimizer.state.values():
            values["exp_avg"] = values["exp_avg"].float() + 1e-7  # not a bf16 number
        return Training(model, optimizer, None, None)

    snapshot = Snapshot()
    made = build()
    snapshot.take(capture(made))
    fresh_model = nn.Linear(6, 3).bfloat16()
    fresh = Training(fresh_model, torch.optim.AdamW(fresh_model.parameters(), lr=1e-2), None, None)
    restore(fresh, snapshot.tree())
    assert fingerprint(capture(fresh)) == fingerprint(capture(made))


def test_a_learning_rate_that_is_a_tensor_is_restored_in_place():
    setup = gpt_setup()
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW(setup.model.parameters(), lr=rate)
    training = Training(setup.model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), None)
    snapshot = Snapshot()
    train(training, setup.loss_fn, setup.batches[:1])
    snapshot.take(capture(training))
    kept = optimizer.param_groups[0]["lr"]
    train(training, setup.loss_fn, setup.batches[1:3])
    restore(training, snapshot.tree())
    assert optimizer.param_groups[0]["lr"] is kept
    assert kept.item() == pytest.approx(5e-4)


def test_random_states_of_python_numpy_and_torch_are_restored():
    import numpy as np

    setup = gpt_setup()
    training = Training(setup.model, setup.optimizer, None, None)
    random.gauss(0, 1)  # leaves a second value waiting
    np.random.standard_normal()
    snapshot = Snapshot()
    snapshot.take(capture(training))

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(1).item()]

    expected = draw()
    restore(training, snapshot.tree())
    assert draw() == expected


def test_extra_state_of_modules_is_part_of_the_state():
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    counting = Counting(2, 2)
    model = nn.Sequential(counting)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=1), None, None)
    counting.count = 3
    snapshot = Snapshot()
    snapshot.take(capture(training))
    counting.count = 9
    restore(training, snapshot.tree())
    assert counting.count == 3


def test_a_buffer_that_changed_its_shape_is_replaced():
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(3))
    training = Training(model, torch.optim.SGD(model.parameters(), lr=1), None, None)
    snapshot = Snapshot()
    snapshot.take(capture(training))
    model.cache = torch.ones(7)
    restore(training, snapshot.tree())
    assert torch.equal(dict(model.named_buffers())["cache"], torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Training(nn.Linear(3, 3), torch.optim.SGD([torch.zeros(1)], lr=1), None, None), "lacks"),
        (lambda: setup_training(width=48), r"parameters\.embedding\.weight is"),
        (lambda: setup_training(dtype=torch.bfloat16), "bfloat16"),
        (lambda: setup_training(optimizer="sgd"), "optimizer is torch.optim.adamw.AdamW there and torch.optim.sgd.SGD"),
        (lambda: setup_training(scheduler=True), "scheduler is None there"),
    ],
)
def test_another_setup_is_refused_with_the_differences_named(change, message):
    found = signature(setup_training())
    require_same(found, signature(setup_training()), "here")
    with pytest.raises(ForeignCheckpointError, match=message):
        require_same(found, signature(change()), "there")


def test_optimizer_states_of_another_type_are_refused_by_name():
    here, there = gpt_setup(), gpt_setup()
    trainings = [Training(each.model, each.optimizer, None, None) for each in (here, there)]
    for training in trainings:
        train(training, here.loss_fn, here.batches[:1])
    expected = signature(trainings[0])
    saved = {**capture(trainings[1]), "signature": signature(trainings[1])}
    require_fits(saved, expected, trainings[0], "It")
    values = saved["optimizer"]["state"][3]
    values["exp_avg_sq"] = values["exp_avg_sq"].bfloat16()
    with pytest.raises(ForeignCheckpointError, match="exp_avg_sq of parameter 3 is bfloat16 there and float32 here"):
        require_fits(saved, expected, trainings[0], "It")
    fresh = gpt_setup()
    require_fits(saved, expected, Training(fresh.model, fresh.optimizer, None, None), "It")  # it has none yet


def setup_training(
    width: int = 32, dtype: torch.dtype = torch.float32, optimizer: str = "adamw", scheduler: bool = False
) -> Training:
    from hybridtrainer.models.gpt import GPT, GPTConfig

    model = GPT(GPTConfig("gpt2", 2, width, 2, vocabulary=256, context=16)).to(dtype)
    chosen = make_optimizer(model, optimizer)
    return Training(model, chosen, lr_scheduler.StepLR(chosen, 1) if scheduler else None, None)


class CopyingAdam(torch.optim.Adam):
    def state_dict(self):
        return copy.deepcopy(super().state_dict())


def test_an_optimizer_that_shows_copies_of_its_state_is_restored_too():
    model = nn.Linear(3, 1)
    training = Training(model, CopyingAdam(model.parameters(), lr=0.1), None, None)

    def step() -> None:
        training.optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        training.optimizer.step()

    step()
    saved = copy.deepcopy(capture(training))
    before = fingerprint({"o": training.optimizer.state_dict()})
    step()
    restore(training, saved)
    assert fingerprint({"o": training.optimizer.state_dict()}) == before


def test_an_expanded_buffer_is_restored():
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.ones(1, 2).expand(3, 2))
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None)
    restore(training, copy.deepcopy(capture(training)))
    assert torch.equal(model.get_buffer("mask"), torch.ones(3, 2))


def test_schedulers_made_of_other_parts_are_told_apart():
    def made_of(parts: int) -> dict[str, Any]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inner = [lr_scheduler.ExponentialLR(optimizer, 0.9) for _ in range(parts)]
        sequence = lr_scheduler.SequentialLR(optimizer, inner, list(range(5, 5 * parts, 5)))  # type: ignore[arg-type]
        return signature(Training(model, optimizer, sequence, None))

    require_same(made_of(2), made_of(2), "It")
    with pytest.raises(ForeignCheckpointError, match="scheduler"):
        require_same(made_of(3), made_of(2), "It")


def test_what_is_frozen_need_not_be_captured_to_be_as_before():
    setup = gpt_setup()
    setup.model.get_submodule("blocks.0").requires_grad_(False)
    training = Training(setup.model, setup.optimizer, None, None)
    train(training, setup.loss_fn, setup.batches[:2])
    before = fingerprint(capture(training))
    snapshot = Snapshot()
    snapshot.take(capture(training, frozen=False))
    assert not any(name.startswith("blocks.0.") for name in snapshot.tree()["parameters"])
    train(training, setup.loss_fn, setup.batches[2:4])
    restore(training, snapshot.tree())
    assert fingerprint(capture(training)) == before


def test_what_was_trained_and_not_captured_is_an_error():
    setup = gpt_setup()
    setup.model.get_submodule("blocks.0").requires_grad_(False)
    training = Training(setup.model, setup.optimizer, None, None)
    saved = capture(training, frozen=False)
    setup.model.requires_grad_(True)
    with pytest.raises(KeyError, match=r"blocks\.0"):
        restore(training, saved)
