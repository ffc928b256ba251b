"""The smallest model that can be streamed, for tests that look inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory.engine import Engine
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.stream import stream

WIDTH = 4


class Block(nn.Module):
    """One matrix and one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(x).tanh()
        return out


class Stack(nn.Module):
    """Blocks between an input and a head, which may share their weight."""

    def __init__(self, blocks: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.head.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def stack(blocks: int = 4, tied: bool = False) -> Any:
    torch.manual_seed(0)
    return Stack(blocks, tied)


def stream_stack(
    model: nn.Module | None = None, mode: Any = "fp32", clipping: Any = "fused", slots: int = 2, **options: Any
) -> tuple[Any, StreamedOptimizer, Engine]:
    memory = MemoryConfig(mode=mode, clipping=clipping, max_gpu_blocks=slots)
    model = stream(stack() if model is None else model, memory, "cpu", **{"lr": 0.1, **options})
    optimizer = model.optimizer
    assert isinstance(optimizer, StreamedOptimizer)
    return model, optimizer, optimizer.engine


def loss_of(model: nn.Module, seed: int = 1, samples: int = 3) -> Tensor:
    x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(x.to(next(model.parameters()).dtype)).float().square().mean()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
