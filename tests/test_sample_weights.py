"""What samples count that were taken by chance: the expected loss and gradient are those of all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.data.chosen import ChosenLoader
from hybridtrainer.losses import CheckedLoss
from hybridtrainer.predict.ledger import Ledger
from hybridtrainer.real_step import backward
from hybridtrainer.sample_weights import CAP, StepWeights, weights_of


def test_a_weight_is_the_mean_chance_over_the_own():
    passed = torch.tensor([0.1, 0.5, 1.0, 0.4, 0.0])  # what cannot be taken is no part of the mean
    assert weights_of(passed[1:3], passed).tolist() == pytest.approx([1.0, 0.5])


def test_none_is_above_the_cap():
    passed = torch.tensor([0.01] + [1.0] * 31)
    weights = weights_of(passed, passed)
    assert weights[0] == CAP
    assert weights[1:].tolist() == pytest.approx([31.01 / 32] * 31)


@pytest.mark.parametrize("chance", [1.0, 0.3])
def test_equal_chances_count_exactly_alike(chance):
    assert torch.equal(weights_of(torch.full((7,), chance), torch.full((48,), chance)), torch.ones(7))


def test_no_chance_of_a_ledger_is_capped_once_all_samples_were_seen():
    ledger = Ledger(4096)
    every = torch.arange(4096)
    ledger.learn(every, torch.full((4096,), 2.3))
    for spread in (0.5, 1.0, 2.0, 4.0):
        losses = torch.randn(4096, generator=torch.Generator().manual_seed(1)).mul(spread).exp()
        ledger.learn(every, (losses / losses.mean()).clamp(max=20))
        chances = ledger.chances(every)
        assert float(chances.min()) < 0.9
        assert float(weights_of(chances, chances).max()) < CAP


DATA = torch.randn(512, 3, generator=torch.Generator().manual_seed(5))
CHANCES = torch.where(torch.arange(512) % 4 == 0, 1.0, 0.25)  # every fourth always comes
DATA[::4] += 2.0  # and is of another kind


def each_loss(model: nn.Module, batch: Tensor) -> Tensor:
    losses: Tensor = (model(batch).squeeze(1) - 1).square()
    return losses


def gradient(loss: CheckedLoss, batch: Tensor) -> Tensor:
    loss.model.zero_grad()
    mean = loss.mean(batch)
    mean.backward()
    found = loss.model.weight.grad
    assert isinstance(found, Tensor)
    return torch.cat([found.flatten(), mean.detach()[None]])


@pytest.mark.parametrize(("batch_size", "passes"), [(8, 40), (64, 80)])
def test_the_expected_loss_and_gradient_are_those_of_all_samples(batch_size: int, passes: int):
    torch.manual_seed(0)
    loss = CheckedLoss(nn.Linear(3, 1), each_loss, "fp32")
    expected = gradient(loss, DATA)
    loader = ChosenLoader(DATA, batch_size, lambda indices, *_: CHANCES[indices], weighs=True)
    found: dict[bool, list[Tensor]] = {False: [], True: []}
    for _ in range(passes):
        for batch in loader:
            (given,) = loader.given()
            assert given.weights is not None
            for weighed, gradients in found.items():
                loss.weights = StepWeights([given.weights]) if weighed else None
                gradients.append(gradient(loss, batch))
    errors = [float((torch.stack(each).mean(0) - expected).norm() / expected.norm()) for each in found.values()]
    assert errors[False] > 0.5
    assert errors[True] < 0.03


WEIGHTS = torch.arange(1.0, 13.0) / 6.5


def checked(loss_fn: Any = each_loss) -> CheckedLoss:
    torch.manual_seed(0)
    loss = CheckedLoss(nn.Linear(3, 1), loss_fn, "fp32")
    loss.weights = StepWeights([WEIGHTS[:6], WEIGHTS[6:]])
    return loss


def in_parts(*sizes: float) -> Any:
    """Parts of these sizes; what is negative counts nothing."""

    def parts_of(batch: Tensor) -> list[tuple[Tensor, float]]:
        parts = batch.split([int(abs(size)) for size in sizes])
        return [(part, max(0, size) / 6) for part, size in zip(parts, sizes, strict=True)]

    return parts_of


def total(loss: CheckedLoss, parts_of: Any) -> float:
    batches = [DATA[:6], DATA[6:12]]
    start = lambda share: share.backward()  # noqa: E731
    return float(backward(loss.mean, batches, lambda _: None, start, 2, parts_of, loss.pass_over))


@pytest.mark.parametrize("sizes", [(6,), (3, 3), (4, 2), (1,) * 6])
def test_micro_batches_and_parts_of_them_are_weighed_as_one_batch(sizes):
    loss = checked()
    expected = float((each_loss(loss.model, DATA[:12]) * WEIGHTS).mean().detach())
    assert total(loss, in_parts(*sizes)) == pytest.approx(expected, rel=1e-6)


def test_a_part_that_counts_nothing_leaves_the_others_their_weights():
    loss = checked()
    losses = each_loss(loss.model, DATA[:12]).detach() * WEIGHTS
    expected = float(losses[torch.tensor([0, 1, 4, 5, 6, 7, 10, 11])].sum() / 12)
    assert total(loss, in_parts(2, -2, 2)) == pytest.approx(expected, rel=1e-6)


def test_a_pass_that_is_made_again_begins_with_the_first_weight():
    loss = checked()
    loss.heard = []
    expected = [float(loss.mean(DATA[:6])), float(loss.mean(DATA[6:12]))]
    loss.begin_again()
    loss.mean(DATA[:3])
    loss.begin_again()
    assert [float(loss.mean(DATA[:6])), float(loss.mean(DATA[6:12]))] == expected
    assert [len(each) for each in loss.heard] == [6, 6]


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, batch: each_loss(model, batch).mean(),
        lambda model, batch: each_loss(model, batch).repeat_interleave(2),
        lambda model, batch: each_loss(model, batch)[:3],
    ],
)
def test_losses_that_are_not_one_for_each_sample_stay_as_they_are(loss_fn):
    loss = checked(loss_fn)
    expected = [float(loss_fn(loss.model, batch).mean()) for batch in (DATA[:6], DATA[6:12])]
    assert [float(loss.mean(DATA[:6])), float(loss.mean(DATA[6:12]))] == expected


def test_only_what_a_backward_pass_starts_from_is_weighed():
    loss = checked()
    loss.heard = []
    losses = each_loss(loss.model, DATA[:6])
    assert not torch.equal(loss.mean(DATA[:6]), losses.mean())
    assert torch.equal(loss.heard[0], losses)
    assert torch.equal(loss.values(DATA[:6]), losses)
