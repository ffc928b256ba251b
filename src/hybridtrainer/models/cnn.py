"""Small convolutional nets for images: three 3x3 convolutions, global pooling, one linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrainer.errors import ModelError


@dataclass(frozen=True)
class CNNConfig:
    """Shape of the net: channels of the three convolutions, and whether each is normalized."""

    widths: tuple[int, int, int] = (32, 64, 64)
    channels: int = 1
    classes: int = 10
    batch_norm: bool = False
    dropout: float = 0.0


CNN_WIDTHS: dict[str, tuple[int, int, int]] = {"cnn": (32, 64, 64), "cnn-small": (16, 32, 32)}
"""The nets that can be asked for by name."""


class CNN(nn.Module):
    """Three convolutions with ReLU, the first two followed by pooling.

    >>> import torch
    >>> CNN(CNNConfig())(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = config.channels
        for index, width in enumerate(config.widths):
            layers.append(nn.Conv2d(before, width, 3, padding=1))
            if config.batch_norm:
                layers.append(nn.BatchNorm2d(width))
            layers.append(nn.ReLU())
            if index < 2:
                layers.append(nn.MaxPool2d(2))
            before = width
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(before, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, (batch, channels, height, width) to (batch, classes)."""
        pooled = self.features(images).mean(dim=(2, 3))
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of each sample of a batch of images and labels, in nats."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def image_accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """For each image of the batch 1 if the model names it rightly, else 0."""
    images, labels = batch
    right: Tensor = model(images).argmax(dim=1) == labels
    return right.float()


def build_cnn(
    name: str, *, channels: int = 1, classes: int = 10, batch_norm: bool = False, dropout: float = 0.0
) -> CNN:
    """A net by name, "cnn" or "cnn-small".

    Raises:
        ModelError: for another name.
    """
    if name not in CNN_WIDTHS:
        raise ModelError(f"There is no net named {name!r}.", f"Choose one of: {', '.join(CNN_WIDTHS)}.")
    return CNN(CNNConfig(CNN_WIDTHS[name], channels, classes, batch_norm, dropout))
