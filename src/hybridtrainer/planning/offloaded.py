"""A rehearsal of `offload_activations`: what blocks save for the backward pass is gone until it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hybridtrainer.blocks import find_blocks
from hybridtrainer.memory.offload import AHEAD, SMALLEST_BYTES


@dataclass
class Away:
    """What has left.

    Attributes:
        nbytes: All of it.
        host_bytes: What it takes there: torch's pinned memory comes in powers of two.
        largest: The largest tensor of it.
        tensors: How many there are.
    """

    nbytes: int = 0
    host_bytes: int = 0
    largest: int = 0
    tensors: int = 0

    @property
    def on_the_way_bytes(self) -> int:
        """What is on the device all the same: on its way out, or fetched before it is asked for."""
        return AHEAD * self.largest


def let_go(model: nn.Module) -> Away:
    """Lets the blocks of a model on the meta device forget what they save; returns what will have left.

    Where they are computed again, `recompute_blocks` must have come first.
    """
    away = Away()
    for block in find_blocks(model).modules:
        block.forward = _forgetful(block, block.forward, away)
    return away


def _forgetful(block: nn.Module, inner: Callable[..., Any], away: Away) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        own = {tensor.untyped_storage()._cdata for tensor in (*block.parameters(), *block.buffers())}

        def pack(tensor: Tensor) -> Tensor | tuple[Any, ...]:
            if tensor.untyped_storage()._cdata in own or tensor.nbytes < SMALLEST_BYTES:
                return tensor
            away.nbytes += tensor.nbytes
            away.host_bytes += 1 << (tensor.nbytes - 1).bit_length()
            away.tensors += 1
            away.largest = max(away.largest, tensor.nbytes)
            return tuple(tensor.shape), tensor.stride(), tensor.dtype

        def unpack(packed: Tensor | tuple[Any, ...]) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            shape, stride, dtype = packed
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

        with saved_tensors_hooks(pack, unpack):
            return inner(*args, **kwargs)

    return forward
