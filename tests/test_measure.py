"""Measuring leaves no trace: not in modes, buffers, gradients or random states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support import cnn_setup
from torch import Tensor, nn

from hybridtrainer.buffer_guard import BufferGuard
from hybridtrainer.errors import DataError, ModelError
from hybridtrainer.measure import batches_of, evaluate, measure
from hybridtrainer.models.cnn import image_accuracy, image_loss
from hybridtrainer.randomness import RandomState
from hybridtrainer.tree import fingerprint


def traces(model: nn.Module) -> dict[str, str]:
    return fingerprint(
        {
            "model": dict(model.state_dict()),
            "modes": [module.training for module in model.modules()],
            "gradients": [None if p.grad is None else p.grad for p in model.parameters()],
            "random": RandomState.capture().to_tree(),
        }
    )


@pytest.mark.parametrize("batch_statistics", [False, True])
def test_measuring_leaves_no_trace(batch_statistics):
    setup = cnn_setup(dropout=0.3, count=2)
    setup.loss_fn(setup.model, setup.batches[0]).mean().backward()
    next(setup.model.children()).eval()
    before = traces(setup.model)

    def noisy(batch: Any) -> Tensor:
        return image_loss(setup.model, batch) + torch.rand(())

    guard = BufferGuard(setup.model)
    measure(setup.model, noisy, setup.probes, guard, seed=3, batch_statistics=batch_statistics)
    assert traces(setup.model) == before


def test_an_error_leaves_no_trace_either():
    setup = cnn_setup(count=1)
    before = traces(setup.model)

    def broken(batch: Any) -> Tensor:
        setup.loss_fn(setup.model, batch)
        torch.rand(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure(setup.model, broken, setup.probes, BufferGuard(setup.model), seed=0, batch_statistics=True)
    assert traces(setup.model) == before
    assert torch.is_grad_enabled()


def test_values_are_those_of_evaluation_mode_without_gradients():
    setup = cnn_setup(dropout=0.5, count=1)
    seen: list[tuple[bool, bool]] = []

    def watching(batch: Any) -> Tensor:
        loss = image_loss(setup.model, batch)
        seen.append((setup.model.training, loss.requires_grad))
        return loss

    values = measure(setup.model, watching, setup.probes, BufferGuard(setup.model), seed=0)
    assert seen == [(False, False)] * len(setup.probes)
    setup.model.eval()
    with torch.no_grad():
        expected = [image_loss(setup.model, batch).double().tolist() for batch in setup.probes]
    assert values == expected


def test_random_functions_draw_the_same_for_the_same_seed():
    setup = cnn_setup(count=1)

    def draw(batch: Any) -> Tensor:
        return torch.rand(2)

    def values(seed: int) -> list[list[float]]:
        return measure(setup.model, draw, setup.probes, BufferGuard(setup.model), seed)

    first = values(1)
    torch.rand(5)
    assert values(1) == first
    assert values(2) != first
    assert first[0] != first[1]  # a new draw for each batch


def test_batch_statistics_use_the_batch_where_a_norm_is_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    with torch.no_grad():  # or the second norm would find nothing to normalize
        model.get_parameter("0.weight").fill_(3.0)
        model.get_parameter("0.bias").fill_(1.0)
    model[1].eval()
    batch = torch.randn(16, 3) * 5 + 2

    def outputs(batch_statistics: bool) -> Tensor:
        function = lambda one: model(one).reshape(-1)  # noqa: E731
        guard = BufferGuard(model)
        (values,) = measure(model, function, [batch], guard, seed=0, batch_statistics=batch_statistics)
        return torch.tensor(values).view(16, 3)

    own = 3 * (batch - batch.mean(0)) / (batch.var(0, unbiased=False) + 1e-5).sqrt() + 1
    running = 3 * batch / (1 + 1e-5) ** 0.5 + 1
    second = (1 + 1e-5) ** 0.5  # the frozen norm divides by its running spread in both cases
    assert torch.allclose(outputs(True), own / second, atol=1e-5)
    assert torch.allclose(outputs(False), running / second, atol=1e-5)


def test_evaluation_weighs_samples_alike_and_batches_where_they_give_one_value():
    model = nn.Linear(1, 1)
    batches = [torch.tensor([1.0, 4.0]), torch.tensor([10.0])]
    assert evaluate(model, lambda batch: batch, iter(batches), BufferGuard(model), seed=0) == 5.0
    assert evaluate(model, lambda batch: batch.sum(), batches, BufferGuard(model), seed=0) == 7.5


def test_evaluating_a_metric_on_real_digits_gives_a_share():
    setup = cnn_setup(count=1)
    accuracy = evaluate(
        setup.model, lambda batch: image_accuracy(setup.model, batch), setup.probes, BufferGuard(setup.model), 0
    )
    right = total = 0
    setup.model.eval()
    for images, labels in setup.probes:
        right += int((setup.model(images).argmax(1) == labels).sum())
        total += len(labels)
    assert accuracy == pytest.approx(right / total)


def test_evaluating_on_nothing_is_refused():
    def nothing() -> Iterator[Tensor]:
        yield from ()

    model = nn.Linear(1, 1)
    with pytest.raises(DataError, match="no batches"):
        evaluate(model, lambda batch: batch, nothing(), BufferGuard(model), seed=0)


def test_one_batch_is_not_taken_for_several():
    x, y = torch.ones(4, 2), torch.ones(4)
    assert batches_of(None, "validation") is None
    assert batches_of(iter([(x, y)]), "validation") == [(x, y)]
    assert batches_of([x, y], "validation") == [x, y]  # batches of one tensor each
    with pytest.raises(ModelError, match="validation is a tuple of tensors, which is one batch"):
        batches_of((x, y), "validation")
