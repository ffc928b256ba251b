"""What the blocks of a resident model keep for the backward pass waits in host memory instead of on the GPU.

With `checkpoint_every` that is one input for each segment, without it everything that autograd saves inside a block.
Copies run beside the computation; what comes back has the same bits and the same layout, so results do not change.
Weights stay where they are.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hybridtrainer.blocks import Around, find_blocks
from hybridtrainer.memory.lanes import Event, Lanes, make_lanes
from hybridtrainer.memory.parking import Leaves, on_gpu

AHEAD = 4  # tensors that may be on their way out, or be fetched before they are asked for
SMALLEST_BYTES = 1 << 12  # what is smaller costs more to send than it frees
_INNER = "_without_offload"
_HOST = "_offloaded_to"


def offload_blocks(model: nn.Module, on: bool = True, leaves: Leaves = on_gpu) -> None:
    """Lets what the blocks save wait in host memory; `on=False` takes that back.

    Args:
        model: A model of repeated blocks. Where they are computed again, `recompute_blocks` must have come first.
        on: Whether to do so.
        leaves: Which tensors go; by default those on a GPU, as the others are in host memory already.

    Raises:
        ModelError: if the model has no repeated blocks.

    >>> from hybridtrainer.models.gpt import build_gpt
    >>> model = build_gpt("nano")
    >>> offload_blocks(model)
    >>> model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    """
    for module in model.modules():
        inner = getattr(module.__dict__.get("forward"), _INNER, None)
        if inner is not None:
            module.forward = inner
    if on:
        host = HostTensors(leaves)
        for block in find_blocks(model).modules:
            block.forward = _offloaded(block, block.forward, host)


def forget_sent(model: nn.Module) -> None:
    """Lets go of what is on its way after a pass that failed; nobody will ask for it."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    for host in {getattr(forward, _HOST) for forward in forwards if hasattr(forward, _HOST)}:
        host.forget()


def _offloaded(block: nn.Module, inner: Callable[..., Any], host: HostTensors) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        own = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *block.buffers())}

        def pack(tensor: Tensor) -> Tensor | Waiting:
            is_own = tensor.untyped_storage().data_ptr() in own
            return tensor if is_own or not host.takes(tensor) else host.send(tensor)

        with saved_tensors_hooks(pack, host.get):
            return inner(*args, **kwargs)

    around = Around(block, forward)
    setattr(around, _INNER, inner)
    setattr(around, _HOST, host)
    return around


class Waiting:
    """A tensor in host memory, until the backward pass is done with it."""

    def __init__(self, number: int, home: Tensor, sent: Event, like: Tensor) -> None:
        self.number = number
        self.home, self.sent = home, sent
        self.device, self.stride = like.device, like.stride()
        self.back: Tensor | None = None
        self.arrived: Event = None
        self.was_asked_for = False


class HostTensors:
    """Sends tensors to host memory in the order in which they are saved, and fetches them in the opposite one.

    Args:
        leaves: Which tensors go.
    """

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._lanes: Lanes | None = None
        self._count = 0
        self._waiting: weakref.WeakValueDictionary[int, Waiting] = weakref.WeakValueDictionary()
        self._leaving: deque[tuple[Tensor, Event]] = deque()
        self._fetched: dict[int, Waiting] = {}

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is sent: large enough, on the device, and without two places for one element."""
        return self._leaves(tensor) and tensor.nbytes >= SMALLEST_BYTES and _has_no_overlap(tensor)

    def send(self, tensor: Tensor) -> Waiting:
        """Starts to copy a tensor out."""
        lanes = self._lanes_of(tensor.device)
        for forgotten in self._fetched.values():  # of a graph that was dropped: its memory is still written to
            lanes.wait(forgotten.arrived)
        self._fetched.clear()
        source = tensor.detach()
        home = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        sent = lanes.submit("inputs out", lambda: _copy(home, source), [lanes.mark()])
        # The memory of a tensor that nobody references is used again at once: hold it until its copy has ended.
        self._leaving.append((source, sent))
        while len(self._leaving) > AHEAD:
            lanes.wait(self._leaving.popleft()[1])
        self._count += 1
        waiting = Waiting(self._count, home, sent, source)
        self._waiting[self._count] = waiting
        return waiting

    def forget(self) -> None:
        """Holds on to nothing any more."""
        if self._lanes is not None:
            for _, sent in self._leaving:
                self._lanes.wait(sent)
            for fetched in self._fetched.values():
                self._lanes.wait(fetched.arrived)
        self._leaving.clear()
        self._fetched.clear()

    def get(self, packed: Tensor | Waiting) -> Tensor:
        """What was saved, on its device; those saved before it are fetched meanwhile."""
        if isinstance(packed, Tensor):
            return packed
        packed.was_asked_for = True
        self._fetch(packed)
        for number in range(packed.number - 1, packed.number - AHEAD, -1):
            before = self._waiting.get(number)
            if before is not None and not before.was_asked_for and before.device == packed.device:
                self._fetch(before)
        lanes = self._lanes_of(packed.device)
        while self._leaving:  # the forward pass is over
            lanes.wait(self._leaving.popleft()[1])
        lanes.wait(packed.arrived)
        back, packed.back = packed.back, None
        self._fetched.pop(packed.number, None)
        assert back is not None
        return back

    def _fetch(self, waiting: Waiting) -> None:
        if waiting.back is not None:
            return
        lanes = self._lanes_of(waiting.device)
        home = waiting.home
        back = torch.empty_strided(home.shape, waiting.stride, dtype=home.dtype, device=waiting.device)
        waiting.back = back
        waiting.arrived = lanes.submit("inputs in", lambda: _copy(back, home), [lanes.mark(), waiting.sent])
        self._fetched[waiting.number] = waiting

    def _lanes_of(self, device: torch.device) -> Lanes:
        if self._lanes is None:
            self._lanes = make_lanes(device)
        return self._lanes


def _has_no_overlap(tensor: Tensor) -> bool:
    """Whether each element has a place of its own, so that a copy can have the same strides."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def _copy(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():  # a lane may be a thread of its own
        target.copy_(source, non_blocking=True)
