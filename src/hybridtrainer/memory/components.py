"""What the tensors of a training run take on a device: weights, optimizer states, gradients. Counts; touches nothing.

Whatever else is in use there are activations, workspace, and on a CPU the program itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridtrainer.memory.optimizer import StreamedOptimizer


class Components(NamedTuple):
    """Bytes on one device.

    Attributes:
        weights: Parameters and buffers; of a streamed model the places through which blocks pass too.
        states: What the optimizer keeps.
        gradients: Those that are there now; a streamed model has a block's at most, for a moment, and they are not
            counted.
    """

    weights: int = 0
    states: int = 0
    gradients: int = 0


def components(model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> Components:
    """What a model and its optimizer take on a device now.

    >>> model = nn.Linear(3, 1)
    >>> components(model, torch.optim.AdamW(model.parameters()), torch.device("cpu"))
    Components(weights=16, states=0, gradients=0)
    """
    weights = _bytes_on(device, [*model.parameters(), *model.buffers()])
    states = 0
    if optimizer is not None:
        all_states = optimizer.uncollected_state() if isinstance(optimizer, StreamedOptimizer) else optimizer.state
        kept = (value for state in all_states.values() for value in state.values())
        states = _bytes_on(device, (value for value in kept if isinstance(value, Tensor)))
    parked = 0
    if isinstance(optimizer, StreamedOptimizer):
        rings = optimizer.engine.rings
        places = [ring.nbytes if ring is not None else 0 for ring in (rings.weights, rings.states, rings.gradients)]
        weights, states, parked = weights + places[0], states + places[1], places[2]
    return Components(weights, states, parked + gradient_bytes(model.parameters(), device))


def gradient_bytes(parameters: Iterable[nn.Parameter], device: torch.device) -> int:
    """What the gradients of these parameters take on a device now."""
    return _bytes_on(device, (parameter.grad for parameter in parameters if parameter.grad is not None))


def device_of(model: nn.Module, optimizer: Optimizer | None = None) -> torch.device:
    """Where a model computes; a streamed one has most of its weights elsewhere."""
    if isinstance(optimizer, StreamedOptimizer):
        return optimizer.engine.device
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def _bytes_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.device == device and not tensor.is_sparse)
