"""Small real setups that many tests share: a GPT on Python source, a conv net on digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.data.images import ImageSplits, load_digits
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.data.text import ByteTokenizer, TextSplits, load_text, stdlib_documents
from hybridtrainer.losses import LossFunction
from hybridtrainer.models.cnn import CNN, CNNConfig, image_loss
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss
from hybridtrainer.trainer import HybridTrainer

CONTEXT = 32

EAGER: dict[str, Any] = {
    "predict": ["jumps"],
    "warmup_steps": 12,
    "full_steps": 6,
    "max_predict_steps": 8,
    "correction_interval": 4,
    "correct_steps": 3,
    "confidence_threshold": 0.0,
    "waste_limit": 1.0,
    "lasting_share": 1.0,
    "recovery_steps": 2,
    "max_failures": 1000,
    "history_windows": 4,
}
"""Settings under which a short run goes through all four phases."""


@dataclass
class Setup:
    """A model with everything needed to train it by hand or with the trainer."""

    model: nn.Module
    optimizer: Optimizer
    loss_fn: LossFunction
    batches: list[Any]
    probes: list[Any]

    def trainer(self, **options: Any) -> HybridTrainer:
        settings = options.pop("settings", {"predict": "off"})
        options.setdefault("probe_batches", self.probes)
        return HybridTrainer(self.model, self.optimizer, self.loss_fn, HybridTrainerConfig(**settings), **options)


@cache
def text_splits() -> TextSplits:
    documents = stdlib_documents()[:60]
    return load_text(documents, ByteTokenizer(), CONTEXT, 0.05, 0.05, "test text")


@cache
def digit_splits() -> ImageSplits:
    return load_digits(0.1, 0.1, seed=0)


def tiny_gpt(dropout: float = 0.0, flavour: Any = "gpt2") -> GPT:
    return GPT(GPTConfig(flavour, 2, 32, 2, vocabulary=256, context=CONTEXT, dropout=dropout))


def gpt_setup(optimizer: str = "adamw", dropout: float = 0.1, seed: int = 0, count: int = 200) -> Setup:
    torch.manual_seed(seed)
    model = tiny_gpt(dropout)
    splits = text_splits()
    return Setup(
        model,
        make_optimizer(model, optimizer),
        gpt_loss,
        take(PositionedLoader(splits.train, 8, seed=seed), count),
        take(PositionedLoader(splits.probe, 8, seed=seed), 2),
    )


def cnn_setup(optimizer: str = "adamw", dropout: float = 0.1, seed: int = 0, count: int = 200) -> Setup:
    torch.manual_seed(seed)
    model = CNN(CNNConfig((8, 16, 16), batch_norm=True, dropout=dropout))
    splits = digit_splits()
    return Setup(
        model,
        make_optimizer(model, optimizer),
        image_loss,
        take(PositionedLoader(splits.train, 32, seed=seed), count),
        take(PositionedLoader(splits.probe, 32, seed=seed), 2),
    )


SETUPS = {"gpt": gpt_setup, "cnn": cnn_setup}


def make_optimizer(model: nn.Module, name: str) -> Optimizer:
    match name:
        case "adamw":
            return torch.optim.AdamW(model.parameters(), lr=3e-3)
        case "adam":
            return torch.optim.Adam(model.parameters(), lr=3e-3)
        case "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1)
        case "momentum":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        case "adafactor":
            return torch.optim.Adafactor(model.parameters(), lr=1e-2)
        case "rmsprop":
            return torch.optim.RMSprop(model.parameters(), lr=1e-3)
        case "adagrad":
            return torch.optim.Adagrad(model.parameters(), lr=1e-2)
        case "nadam":
            return torch.optim.NAdam(model.parameters(), lr=2e-3)
        case "adamax":
            return torch.optim.Adamax(model.parameters(), lr=2e-3)
        case "radam":
            return torch.optim.RAdam(model.parameters(), lr=2e-3)
    raise ValueError(name)


def take(loader: PositionedLoader, count: int) -> list[Any]:
    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    stream = endless()
    return [next(stream) for _ in range(count)]


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name
