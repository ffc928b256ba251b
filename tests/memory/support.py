"""Small decoders trained plainly and streamed, to be compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory.body import Body
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
SMALL = GPTConfig("gpt2", 4, 64, 4, vocabulary=96, context=16, dropout=0.1)
LLAMA = GPTConfig("llama", 5, 64, 4, vocabulary=96, context=16, kv_heads=2, tied=False)
LR, DECAY = 3e-3, 0.1


@dataclass
class Run:
    """What training left."""

    losses: list[float]
    weights: dict[str, Tensor]


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def failing_block(monkeypatch: pytest.MonkeyPatch, call: int) -> Iterator[None]:
    """While open, this one of the following backward passes of blocks fails."""
    original, calls = Body.gradients, 0

    def failing(self: Body, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("a cosmic ray")
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Body, "gradients", failing)
        yield


def batches(steps: int, device: str = "cpu", samples: int = 8, time: int = 17, vocabulary: int = 96) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (samples, time), generator=generator).to(device) for _ in range(steps)]


def build(config: GPTConfig = SMALL, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def streamed(
    memory: MemoryConfig, device: str = "cpu", model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, StreamedOptimizer]:
    model = stream(build() if model is None else model, memory, device, **{"lr": LR, "weight_decay": DECAY, **options})
    optimizer = model.optimizer
    assert isinstance(optimizer, StreamedOptimizer)
    return model, optimizer


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[Tensor],
    accumulate: int = 1,
    clip: float | None = None,
    scheduler: Any | None = None,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = gpt_loss,
) -> Run:
    """The same loop for both; clipping is the streamed optimizer's own."""
    torch.manual_seed(7)
    losses = []
    with deterministic():
        for batch in data:
            total = 0.0
            for micro_batch in batch.chunk(accumulate):
                loss = loss_of(model, micro_batch).mean() / accumulate
                loss.backward()
                total += loss.item()
            if clip is not None and not isinstance(optimizer, StreamedOptimizer):
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            losses.append(total)
    return Run(losses, weights_of(model, optimizer))


def weights_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    if isinstance(optimizer, StreamedOptimizer):
        optimizer.settle()
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def plain(model: nn.Module, device: str = "cpu", groups: Any = None) -> tuple[nn.Module, torch.optim.AdamW]:
    model = model.to(device)
    return model, torch.optim.AdamW(groups or model.parameters(), lr=LR, weight_decay=DECAY, foreach=False)


def same(one: Run, other: Run) -> bool:
    return one.losses == other.losses and all(
        torch.equal(weight, other.weights[name]) for name, weight in one.weights.items()
    )
