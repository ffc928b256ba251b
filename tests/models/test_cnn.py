"""The convolutional nets: shapes, sizes, losses, and that they learn real digits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.support import digit_splits, take
from torch import nn

from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.errors import ModelError
from hybridtrainer.models.cnn import CNN, CNN_WIDTHS, CNNConfig, build_cnn, image_accuracy, image_loss


@pytest.mark.parametrize(("name", "parameters"), [("cnn", 56_394), ("cnn-small", 14_378)])
def test_a_net_has_the_size_of_its_name(name, parameters):
    assert sum(parameter.numel() for parameter in build_cnn(name).parameters()) == parameters


def test_every_name_was_measured():
    assert set(CNN_WIDTHS) == {"cnn", "cnn-small"}


def test_an_unknown_name_is_refused():
    with pytest.raises(ModelError, match="cnn-huge"):
        build_cnn("cnn-huge")


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 48)])
def test_logits_have_one_column_a_class_for_any_image_size(shape, batch_norm):
    model = build_cnn("cnn-small", channels=shape[0], classes=7, batch_norm=batch_norm)
    assert model(torch.zeros(2, *shape)).shape == (2, 7)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == (3 if batch_norm else 0)


def test_the_net_equals_one_written_out():
    torch.manual_seed(0)
    model = CNN(CNNConfig((4, 5, 6), channels=2, classes=3))
    weights = dict(model.named_parameters())
    x = images = torch.randn(2, 2, 8, 12)
    for index, layer in enumerate((0, 3, 6)):
        x = F.conv2d(x, weights[f"features.{layer}.weight"], weights[f"features.{layer}.bias"], padding=1).clamp(min=0)
        x = F.max_pool2d(x, 2) if index < 2 else x
    assert x.shape == (2, 6, 2, 3)
    expected = x.mean(dim=(2, 3)) @ weights["head.weight"].t() + weights["head.bias"]
    assert torch.allclose(model(images), expected, atol=1e-5)


def test_dropout_is_random_in_training_and_absent_in_evaluation():
    torch.manual_seed(0)
    model = CNN(CNNConfig((4, 4, 4), dropout=0.5))
    images = torch.randn(8, 1, 8, 8)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


def fixed(logits: torch.Tensor) -> nn.Module:
    class Fixed(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return logits

    return Fixed()


def test_loss_and_accuracy_are_those_of_the_logits():
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])
    batch = torch.zeros(3, 1, 8, 8), torch.tensor([0, 2, 1])
    expected = [
        math.log(math.exp(2) + 2) - 2,
        math.log(math.exp(3) + 2) - 3,
        math.log(math.exp(1) + 2),
    ]
    assert image_loss(fixed(logits), batch).tolist() == pytest.approx(expected)
    assert image_accuracy(fixed(logits), batch).mean().item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_small_net_learns_digits(batch_norm):
    torch.manual_seed(0)
    model = build_cnn("cnn-small", batch_norm=batch_norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    splits = digit_splits()
    for batch in take(PositionedLoader(splits.train, 32, seed=0), 200):
        image_loss(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    validation = splits.validation.batch_of(range(len(splits.validation)))
    assert image_accuracy(model, validation).mean().item() > 0.9
