"""One real step: what it computes, what it withholds, what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from tests.support import gpt_setup
from torch import nn

from hybridtrainer.errors import DataError, ModelError
from hybridtrainer.losses import CheckedLoss
from hybridtrainer.real_step import RealStep, micro_batches_of
from hybridtrainer.state import Training


def quiet(*_: object) -> None:
    pass


def test_the_norm_is_that_before_clipping_and_the_update_that_after():
    setup, twin = gpt_setup(dropout=0.0), gpt_setup(dropout=0.0)
    training = Training(setup.model, setup.optimizer, None, None)
    step = RealStep(training, CheckedLoss(setup.model, setup.loss_fn, "fp32"), clip_norm=0.01)
    outcome = step([setup.batches[0]], quiet, quiet)
    loss = twin.loss_fn(twin.model, twin.batches[0]).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.01)
    twin.optimizer.step()
    assert (outcome.loss, outcome.norm) == (loss.item(), norm.item())
    assert outcome.norm > 0.01 and not outcome.problem and not outcome.overflow
    for ours, theirs in zip(setup.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None


def test_callbacks_come_once_per_micro_batch_and_once_per_step():
    setup = gpt_setup()
    training = Training(setup.model, setup.optimizer, None, None)
    step = RealStep(training, CheckedLoss(setup.model, setup.loss_fn, "fp32"), clip_norm=None)
    calls: list[str] = []
    step(setup.batches[:3], lambda batch: calls.append("forward"), lambda: calls.append("backward"))
    assert calls == ["forward"] * 3 + ["backward"]


def test_sparse_gradients_are_counted_and_applied():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    loss = CheckedLoss(model, lambda model, batch: model(batch).square().mean(), "fp32")
    step = RealStep(Training(model, optimizer, None, None), loss, clip_norm=None)
    before = model.weight.detach().clone()
    outcome = step([torch.tensor([1, 1, 3])], quiet, quiet)
    assert outcome.norm > 0
    changed = (model.weight != before).any(dim=1)
    assert changed.tolist() == [index in (1, 3) for index in range(10)]


def test_weights_without_a_gradient_are_no_problem():
    used, unused = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(used, unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = CheckedLoss(model, lambda model, batch: used(batch).square().mean(), "fp32")
    step = RealStep(Training(model, optimizer, None, None), loss, clip_norm=1.0)
    before = unused.weight.detach().clone()
    outcome = step([torch.ones(2, 3)], quiet, quiet)
    assert outcome.norm > 0 and torch.equal(unused.weight, before)


@pytest.mark.parametrize("batch", [torch.zeros(3), [1, 2], "abc", None])
def test_a_wrong_number_of_micro_batches_is_said_so(batch):
    assert micro_batches_of(batch, 1) == [batch] or torch.is_tensor(batch)
    with pytest.raises(DataError, match="3 micro-batches"):
        micro_batches_of(batch, 3)
    assert micro_batches_of((1, 2, 3), 3) == (1, 2, 3)


def test_a_group_added_later_is_refused_before_anything_changes():
    setup = gpt_setup()
    trainer = setup.trainer(settings={"predict": "off"})
    trainer.step(setup.batches[0])
    setup.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    before = [parameter.detach().clone() for parameter in setup.model.parameters()]
    with pytest.raises(ModelError, match="had 1 groups"):
        trainer.step(setup.batches[1])
    assert all(torch.equal(a, b) for a, b in zip(before, setup.model.parameters(), strict=True))


def test_shares_of_a_steps_loss_are_added_and_not_divided():
    setup, twin = gpt_setup(dropout=0.0), gpt_setup(dropout=0.0)

    def share(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return setup.loss_fn(model, batch).sum() / 24

    share.is_share = True  # type: ignore[attr-defined]
    batches = [setup.batches[0], setup.batches[1], setup.batches[2]]
    training = Training(setup.model, setup.optimizer, None, None)
    outcome = RealStep(training, CheckedLoss(setup.model, share, "fp32"), clip_norm=None)(batches, quiet, quiet)
    losses = [share(twin.model, batch) for batch in batches]
    for loss in losses:
        loss.backward()
    twin.optimizer.step()
    assert outcome.loss == pytest.approx(sum(loss.item() for loss in losses))
    for ours, theirs in zip(setup.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_batch_that_is_a_tuple_of_tensors_is_not_taken_for_micro_batches():
    x, y = torch.ones(4, 2), torch.ones(4)
    assert micro_batches_of([(x, y), (x, y)], 2) == [(x, y), (x, y)]
    with pytest.raises(DataError, match="it got a tuple of tensors, which is one batch"):
        micro_batches_of((x, y), 2)
