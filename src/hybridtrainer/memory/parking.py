"""Tensors that leave their device for a while: their values wait in host memory and come back bit for bit.

The tensor objects stay, so whoever holds one need not know. This module does not know what the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Leaves = Callable[[Tensor], bool]


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor takes GPU memory; others are in host memory already."""
    return tensor.is_cuda


class Parking:
    """Where tensors wait.

    Args:
        leaves: Which tensors leave; those in host memory have nowhere to go.
        hollow: Leaves NaN behind, on the device, for those who ask a tensor for its place but must not read it.
            Otherwise a parked tensor is its copy in host memory.

    >>> parking, weight = Parking(leaves=lambda tensor: True), torch.ones(3)
    >>> parking.park([(weight, weight.clone())])
    12
    >>> parking.bring_back(); weight
    tensor([1., 1., 1.])
    """

    def __init__(self, leaves: Leaves = on_gpu, *, hollow: bool = False) -> None:
        self.leaves = leaves
        self._hollow = hollow
        self._parked: list[tuple[Tensor, Tensor, torch.device, tuple[int, ...]]] = []

    @torch.no_grad()
    def park(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> int:
        """Frees the memory of tensors.

        Args:
            pairs: Each tensor with an exact copy in host memory, complete by now, which nobody may change until
                `bring_back`.

        Returns:
            The bytes that were freed.
        """
        freed = 0
        for tensor, copy in pairs:
            if self.leaves(tensor):
                self._parked.append((tensor, copy, tensor.device, tensor.stride()))
                freed += tensor.nbytes
                tensor.data = tensor.new_full((), math.nan).expand(tensor.shape) if self._hollow else copy
        return freed

    @property
    def is_used(self) -> bool:
        """Whether something waits here."""
        return bool(self._parked)

    @torch.no_grad()
    def bring_back(self) -> None:
        """Gives every parked tensor memory on its device again, with the values it had."""
        while self._parked:
            tensor, copy, device, stride = self._parked[-1]
            back = torch.empty_strided(copy.shape, stride, dtype=copy.dtype, device=device)
            # Not waited for: whatever reads it next on the device comes after, and the copy outlives this.
            tensor.data = back.copy_(copy, non_blocking=True)
            self._parked.pop()
