"""A model on several ranks: copies of it (DDP), or a shard of every weight on each (FSDP2).

    copies   each rank has all weights and its own samples; gradients are averaged when every rank has its own complete,
             so that a rank that fails before has harmed nobody
    shards   weights, gradients and optimizer states are divided; torch gathers and scatters them inside the passes

A shard is a tensor like any other once `local` has taken it out: windows, snapshots, averages and checkpoints are made
of those. This module decides nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hybridtrainer import ranks
from hybridtrainer.errors import ModelError

PIECE_ELEMENTS = 1 << 24  # of gradients that are averaged at one time, so that no second copy of all is made


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what torch wraps around it to train it on several ranks."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, sharing its memory; the tensor itself where it is not sharded."""
    to_local = getattr(tensor, "to_local", None)
    found: Tensor = tensor if to_local is None else to_local()
    return found


def is_shard(tensor: Tensor) -> bool:
    """Whether other ranks have the rest of it."""
    return hasattr(tensor, "to_local")


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's weights are divided among ranks."""
    return any(map(is_shard, model.parameters()))


def part_of(saved: Tensor, like: Tensor) -> Tensor:
    """Of a whole tensor the part that this rank has of `like`; a tensor of that part's shape is taken for it.

    FSDP2 divides the first dimension as `torch.chunk` does; the last ranks may have nothing.
    """
    if not is_shard(like) or saved.shape == local(like).shape:
        return saved
    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    parts = saved.chunk(mesh.size(), dim=0)
    number = mesh.get_local_rank()
    return parts[number] if number < len(parts) else saved[:0]


def as_shard(part: Tensor, like: Tensor) -> Tensor:
    """The part of this rank, as a tensor that is divided like `like`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.to(like.device), like.device_mesh, like.placements,  # type: ignore[attr-defined]
        run_check=False, shape=like.shape, stride=like.stride(),
    )  # fmt: skip


def own_part(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dictionary; of what is divided among ranks, this rank's part."""
    parts = {
        index: {key: local(value) if isinstance(value, Tensor) else value for key, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": parts}


def divided_like(optimizer: Optimizer, saved: Any) -> Any:
    """A saved state with its tensors divided as the weights are; they are whole, or this rank's part already."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(map(is_shard, parameters)):
        return saved

    def divided(value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor) or value.shape not in (parameter.shape, local(parameter).shape):
            return value
        return as_shard(part_of(value, parameter), parameter)

    states = {
        index: {key: divided(value, parameters[index]) for key, value in values.items()}
        for index, values in saved["state"].items()
    }
    return {**saved, "state": states}


def reshard(model: nn.Module) -> None:
    """Puts the shards back in their place after a pass without a backward one, which would have done so."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):  # an FSDPModule; its class is made when a model is sharded
            module.reshard()  # type: ignore[operator]


class Replicas:
    """How the ranks of one run come to the same update.

    Args:
        model: As the user gave it.
        overlap: Let DDP average gradients while it computes them. Then no rank can begin its step again.

    Attributes:
        sharded: Whether weights are divided.
        overlaps: Whether DDP averages gradients itself.
    """

    def __init__(self, model: nn.Module, overlap: bool = False) -> None:
        self.sharded = is_sharded(model)
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        self.overlaps = overlap and self._wrapper is not None
        self._model = unwrapped(model)
        self.settle()

    @property
    def in_lockstep(self) -> bool:
        """Whether no rank can finish a pass without the others."""
        return self.sharded or self.overlaps

    def settle(self) -> None:
        """Keeps DDP from copying buffers in the next pass: `share_buffers_` does it, and probes go their own way."""
        if self._wrapper is not None:
            self._wrapper.require_forward_param_sync = False

    def alone(self) -> AbstractContextManager[Any]:
        """While open, backward passes are this rank's own."""
        return nullcontext() if self._wrapper is None else self._wrapper.no_sync()

    def average_(self, parameters: Sequence[nn.Parameter], presence: Sequence[str]) -> None:
        """Makes every gradient the mean over all ranks; one that a rank lacks counts as zero there.

        Args:
            parameters: Whose gradients.
            presence: What `presence` gave on every rank.
        """
        if self._wrapper is None:
            return
        if len(set(presence)) > 1:
            self._fill_gaps(parameters)
        mean_([parameter.grad for parameter in parameters if parameter.grad is not None])

    def presence(self, parameters: Sequence[nn.Parameter]) -> str:
        """Which parameters have a gradient, as a short digest."""
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
            raise ModelError(
                "A gradient is sparse, and those are not averaged over several ranks.",
                "Make the embedding with sparse=False.",
            )
        return hashlib.sha256(_mask(parameters).encode()).hexdigest()[:16]

    @torch.no_grad()
    def share_buffers_(self) -> None:
        """Gives every rank the buffers of the first: what each has seen of its own samples differs."""
        if ranks.count() == 1:
            return
        # An expanded buffer is a constant.
        buffers = [buffer for buffer in self._model.buffers() if buffer.numel() and 0 not in buffer.stride()]
        for group in _alike(buffers, PIECE_ELEMENTS):
            whole = torch.cat([buffer.detach().reshape(-1).view(torch.uint8) for buffer in group])
            dist.broadcast(whole, 0)
            if not ranks.is_first():
                sizes = [buffer.nbytes for buffer in group]
                for buffer, piece in zip(group, torch.split(whole, sizes), strict=True):
                    buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))

    @staticmethod
    def _fill_gaps(parameters: Sequence[nn.Parameter]) -> None:
        masks = ranks.exchange("gradients that are there", _mask(parameters))
        for parameter, *present in zip(parameters, *masks, strict=True):
            if "1" in present and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@torch.no_grad()
def mean_(tensors: Iterable[Tensor]) -> None:
    """Makes every tensor its mean over all ranks, in place; 16-bit ones are added in fp32."""
    if ranks.count() == 1:
        return
    for group in _alike(list(tensors), PIECE_ELEMENTS):
        whole = torch.cat([tensor.reshape(-1) for tensor in group])
        if whole.itemsize < 4:
            whole = whole.float()
        whole /= ranks.count()
        dist.all_reduce(whole)
        for tensor, piece in zip(group, torch.split(whole, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def norm_of_shards(norm: Tensor) -> Tensor:
    """The norm of all shards together, from that of this rank's."""
    total = norm.double().square()
    dist.all_reduce(total)
    return total.sqrt().to(norm.dtype)


def _mask(parameters: Sequence[nn.Parameter]) -> str:
    return "".join("0" if parameter.grad is None else "1" for parameter in parameters)


def _alike(tensors: Sequence[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """The tensors in groups of one type on one device, of about so many elements each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    filled: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        kinds.setdefault(kind, []).append(tensor)
        filled[kind] += tensor.numel()
        if filled.get(kind, 0) >= elements:
            yield kinds.pop(kind)
            del filled[kind]
    yield from kinds.values()
