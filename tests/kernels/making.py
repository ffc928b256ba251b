"""Parameters with their state, gradients and hyperparameters, for tests of the updates."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from hybridtrainer.kernels.formats import Format, state_fields, weight_dtype
from hybridtrainer.kernels.reference import Hyper, State, write_

FORMATS: tuple[Format, ...] = ("fp32", "split32", "split8", "sr8", "sr4", "sr32", "full8", "full4", "factored")


def hyper(step: int = 1, **changes: float) -> Hyper:
    values = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "seed": 3, "tensor": 7}
    return Hyper(step=step, **(values | changes))  # type: ignore[arg-type]


def parameter(
    kind: Format, shape: Sequence[int], device: str = "cpu", seed: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    values = torch.randn(prod(shape), generator=torch.Generator().manual_seed(seed)).to(device)
    weight = torch.empty(prod(shape), dtype=weight_dtype(kind), device=device)
    state = {
        name: torch.zeros(length, dtype=dtype, device=device)
        for name, (dtype, length) in state_fields(kind, shape).items()
    }
    write_(kind, weight, state, values)
    return weight, state


def gradients(elements: int, step: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Of very different size from element to element, as in a model."""
    generator = torch.Generator().manual_seed(1000 + step)
    size = torch.logspace(-4, 0, elements)[torch.randperm(elements, generator=generator)]
    return (torch.randn(elements, generator=generator) * size).to(dtype).to(device)


def one(device: str = "cpu") -> Tensor:
    return torch.tensor(1.0, device=device)


def yes(device: str = "cpu") -> Tensor:
    return torch.tensor(1, dtype=torch.int32, device=device)


def no(device: str = "cpu") -> Tensor:
    return torch.tensor(0, dtype=torch.int32, device=device)


def clones(state: State) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
