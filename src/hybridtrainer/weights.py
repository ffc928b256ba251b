"""The trainable weights of a model, read and displaced in place, bucket by bucket.

A bucket is at most a few million neighbouring elements of one group, so that no operation here needs a second
copy of the model on its device. Groups come from the caller; this module knows neither forecasts nor files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.replicas import is_shard, local, norm_of_shards

BUCKET_ELEMENTS = 1 << 22
SLAB_BYTES = 1 << 26  # of host memory that is asked for at one time
CLIP_EPSILON = 1e-6  # as torch's own clipping has it


@dataclass(frozen=True)
class WeightGroup:
    """Parameters that are forecast together.

    Attributes:
        name: Their role, for people.
        lr_group: Index of their group in the optimizer, which has their learning rate.
        parameters: The parameters, each in one group only.
    """

    name: str
    lr_group: int
    parameters: tuple[nn.Parameter, ...]


class Home(Protocol):
    """Where the exact values of a parameter are, if the parameter itself does not have them.

    Found as the attribute `home` of a parameter; a streamed one has it.
    """

    def read(self, start: int, stop: int) -> Tensor:
        """A range of the values in fp32."""
        ...

    def add_(self, start: int, displacement: Tensor) -> None:
        """Adds to the values from `start` on."""
        ...


@dataclass(frozen=True)
class Segment:
    """A range of a parameter's elements, in memory order."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def home(self) -> Home | None:
        """Where its exact values are, if not here."""
        return getattr(self.parameter, "home", None)

    def read(self) -> Tensor:
        """The values, flat."""
        return self.view() if self.home is None else self.home.read(self.start, self.stop)

    def view(self, like: Tensor | None = None) -> Tensor:
        """The elements as a flat view; of `like`, a tensor laid out as the parameter is, where given."""
        whole = flat(self.parameter if like is None else like)
        return whole if self.stop - self.start == len(whole) else whole[self.start : self.stop]


@dataclass(frozen=True)
class Bucket:
    """Neighbouring segments of one group, of one type and on one device."""

    group: int
    segments: tuple[Segment, ...]
    elements: int

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.segments[0].parameter.device

    def read(self) -> Tensor:
        """The weights as one flat fp32 tensor (fp64 for fp64 weights) on their device."""
        pieces = [segment.read() for segment in self.segments]
        return torch.cat(pieces).to(working_dtype(pieces[0].dtype))

    def add_(self, displacement: Tensor) -> None:
        """Adds a flat displacement to the weights in place; weights frozen meanwhile stay."""
        offset = 0
        for segment in self.segments:
            view = segment.view()
            piece = displacement[offset : offset + len(view)]
            if not segment.parameter.requires_grad:
                pass
            elif segment.home is not None:
                segment.home.add_(segment.start, piece)
            elif view.dtype == piece.dtype:
                view.add_(piece)
            else:  # 16-bit weights: add in fp32, round once
                view.copy_(view.to(torch.promote_types(view.dtype, piece.dtype)) + piece)
            offset += len(view)


class Weights:
    """All trainable weights in buckets."""

    def __init__(self, groups: Sequence[WeightGroup], bucket_elements: int = BUCKET_ELEMENTS) -> None:
        self.groups = tuple(groups)
        self.buckets: list[Bucket] = []
        for index, group in enumerate(self.groups):
            kinds = {(parameter.dtype, parameter.device): None for parameter in group.parameters}
            for kind in kinds:
                alike = [parameter for parameter in group.parameters if (parameter.dtype, parameter.device) == kind]
                self.buckets += _cut(index, alike, bucket_elements)

    @property
    def sharded(self) -> bool:
        """Whether other ranks have the rest of them."""
        return any(is_shard(parameter) for group in self.groups for parameter in group.parameters)

    def elements(self) -> int:
        """How many weights there are here."""
        return sum(bucket.elements for bucket in self.buckets)

    def wait_for_copies(self) -> None:
        """Returns when copies between these weights and host memory have ended, so that the CPU may read them."""
        _wait_for_devices(bucket.device for bucket in self.buckets)


class HostCopy:
    """An exact copy of tensors in host memory, with buffers that are kept for the next copy.

    For tensors on a GPU the buffers are pinned.
    """

    SLAB_BYTES = SLAB_BYTES

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Copies the tensors, in place of what was copied before."""
        shapes_fit = [(name, copy.shape, copy.dtype) for name, copy in self._copies.items()] == [
            (name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()
        ]
        if not shapes_fit:
            self._allocate(tensors)
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        _wait_for_devices(tensor.device for tensor in tensors.values())

    def __getitem__(self, name: str) -> Tensor:
        return self._copies[name]

    def nbytes(self) -> int:
        """Host memory held."""
        slabs = {copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in self._copies.values()}
        return sum(slabs.values())

    def _allocate(self, tensors: dict[str, Tensor]) -> None:
        self._copies = {}  # what they hold goes first
        sizes = [(tensor.numel(), tensor.dtype) for tensor in tensors.values()]
        flat_copies = host_buffers(sizes, any(tensor.is_cuda for tensor in tensors.values()), self.SLAB_BYTES)
        for (name, tensor), copy in zip(tensors.items(), flat_copies, strict=True):
            self._copies[name] = copy.view(tensor.shape)


def host_buffers(sizes: Sequence[tuple[int, torch.dtype]], pinned: bool, slab_bytes: int = SLAB_BYTES) -> list[Tensor]:
    """Flat tensors in host memory, cut from as few slabs as may be.

    Slabs are of a power of two, which torch's allocator of pinned memory does not round up, where more than one is
    needed and no tensor is larger.

    Args:
        sizes: Elements and type of each.
        pinned: So that copies from and to a GPU run beside the host.
        slab_bytes: Of a slab.
    """
    needed = [-(-count * dtype.itemsize // 64) * 64 for count, dtype in sizes]
    left, free = sum(needed), torch.empty(0, dtype=torch.uint8)
    made: list[Tensor] = []
    for (count, dtype), nbytes in zip(sizes, needed, strict=True):
        if free.nbytes < nbytes:
            free = torch.empty(max(nbytes, min(slab_bytes, left)), dtype=torch.uint8, pin_memory=pinned)
        made.append(free[: count * dtype.itemsize].view(dtype))
        free, left = free[nbytes:], left - nbytes
    return made


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as a flat view in memory order, whatever its layout.

    Raises:
        ModelError: for a tensor whose elements overlap or have gaps.
    """
    tensor = local(tensor.detach())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            raise ModelError(
                f"A parameter of shape {tuple(tensor.shape)} has gaps or overlaps (strides {tensor.stride()}).",
                "Give the model parameters of their own, for example with `.clone()`.",
            )
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global 2-norm of all gradients, on their device; sparse gradients count by their values."""
    gradients = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    # Asked at every step, of every weight: a plain tensor is not asked twice what it is.
    values = [grad if type(grad) is Tensor and not grad.is_sparse else _values(grad) for grad in gradients]
    norm = torch.nn.utils.get_total_norm(values) if values else torch.zeros(())
    sharded = any(type(grad) is not Tensor and is_shard(grad) for grad in gradients)
    return norm_of_shards(norm) if sharded else norm


def _values(gradient: Tensor) -> Tensor:
    """What this rank has of it, without the zeros of a sparse one."""
    return gradient.coalesce().values() if gradient.is_sparse else local(gradient)


@torch.no_grad()
def clip_gradients_(parameters: Iterable[nn.Parameter], clip_norm: float, norm: Tensor) -> None:
    """Scales gradients of this global norm down to `clip_norm`, as torch does; of shards those that are here."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, (clip_norm / (norm + CLIP_EPSILON)).clamp(max=1.0))


def _wait_for_devices(devices: Iterable[torch.device]) -> None:
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _cut(group: int, parameters: Sequence[nn.Parameter], bucket_elements: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    segments: list[Segment] = []
    filled = 0
    for parameter in parameters:
        start, count = 0, len(flat(parameter))
        while start < count:
            stop = min(count, start + bucket_elements - filled)
            segments.append(Segment(parameter, start, stop))
            filled += stop - start
            start = stop
            if filled == bucket_elements:
                buckets.append(Bucket(group, tuple(segments), filled))
                segments, filled = [], 0
    if segments:
        buckets.append(Bucket(group, tuple(segments), filled))
    return buckets


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which weights of a type are read."""
    return torch.float64 if dtype == torch.float64 else torch.float32
