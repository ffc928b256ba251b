"""What a loss function may return, and what is said of anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.errors import LossError
from hybridtrainer.losses import CheckedLoss, samples_in


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def checked(function: Any, precision: str = "fp32") -> CheckedLoss:
    return CheckedLoss(model(), function, precision)


BATCH = torch.ones(4, 3)


def per_sample(net: nn.Module, batch: Tensor) -> Tensor:
    squares: Tensor = net(batch * torch.arange(1.0, 5.0)[:, None]).square().mean(dim=1)
    return squares


def scalar(net: nn.Module, batch: Tensor) -> Tensor:
    return per_sample(net, batch).mean()


def test_values_are_returned_as_they_are_and_the_mean_is_theirs():
    values = checked(per_sample).values(BATCH)
    assert torch.equal(values, per_sample(model(), BATCH))
    assert torch.equal(checked(per_sample).mean(BATCH), values.mean())


def test_a_scalar_is_its_own_mean():
    loss = checked(scalar)
    assert loss.values(BATCH).dim() == loss.mean(BATCH).dim() == 0
    assert torch.equal(loss.mean(BATCH), scalar(model(), BATCH))


def test_a_vector_of_one_becomes_a_scalar():
    assert checked(lambda net, batch: per_sample(net, batch)[:1]).mean(BATCH).dim() == 0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda net, batch: 1.5, "returned a float"),
        (lambda net, batch: None, "returned a NoneType"),
        (lambda net, batch: (scalar(net, batch), 1), "returned a tuple"),
        (lambda net, batch: net(batch), r"shape \(4, 2\)"),
        (lambda net, batch: per_sample(net, batch)[:0], r"shape \(0,\)"),
        (lambda net, batch: net(batch).argmax(), "torch.int64"),
        (lambda net, batch: scalar(net, batch) > 0, "torch.bool"),
    ],
)
def test_what_is_no_loss_is_refused_with_what_it_is(function, words):
    for call in (checked(function).values, checked(function).mean):
        with pytest.raises(LossError, match=words):
            call(BATCH)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, batch: scalar(net, batch).detach(),
        lambda net, batch: torch.tensor(scalar(net, batch).item()),
        lambda net, batch: batch.mean(),
    ],
)
def test_a_loss_without_weights_can_be_measured_but_not_trained_on(function):
    assert checked(function).values(BATCH).isfinite()
    with pytest.raises(LossError, match="depends on no trainable weight"):
        checked(function).mean(BATCH)


def test_an_error_of_the_loss_function_arrives_as_it_was_raised():
    def broken(net: nn.Module, batch: Tensor) -> Tensor:
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        checked(broken).values(BATCH)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_model_computes_in_the_chosen_precision(precision, dtype):
    seen: list[torch.dtype] = []

    def watching(net: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = net(batch)
        seen.append(out.dtype)
        return out.float().mean()

    loss = checked(watching, precision)
    loss.mean(BATCH).backward()
    assert seen == [dtype]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        (torch.zeros(()), 1),
        ((torch.zeros(7, 2), torch.zeros(9)), 7),
        ({"name": "a", "x": [torch.zeros(3)]}, 3),
        ({"x": None}, 1),
        ("no tensor at all", 1),
        ([], 1),
    ],
)
def test_the_samples_of_a_batch_are_the_length_of_its_first_tensor(batch, samples):
    assert samples_in(batch) == samples


def test_copies_of_weights_in_16_bits_stay_only_where_there_are_gradients():
    model = nn.Linear(4, 4)
    seen: list[bool] = []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(torch.is_autocast_cache_enabled())
        total: Tensor = model(batch).sum()
        return total

    loss = CheckedLoss(model, loss_fn, "bf16")
    loss.mean(torch.ones(2, 4))
    with torch.no_grad():
        loss.values(torch.ones(2, 4))
    assert seen == [True, False]


def test_a_function_says_whether_it_returns_shares_of_a_step():
    def share(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()  # type: ignore[no-any-return]

    assert (checked(share).divisor(3), checked(share).parts_add) == (3, False)
    share.is_share = share.parts_add = True  # type: ignore[attr-defined]
    assert (checked(share).divisor(3), checked(share).parts_add) == (1, True)
