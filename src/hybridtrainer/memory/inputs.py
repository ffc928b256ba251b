"""Where the inputs of the blocks wait for the backward pass: on the device, or in host memory.

Only the hidden state is worth the journey; masks and positions are small and shared.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.lanes import Event, Lanes

AHEAD = 2  # device buffers for what comes back; also hidden states that may still be on their way out


class Kept(Protocol):
    """The inputs of one call, kept for as long as this is referenced."""

    def get(self) -> list[Tensor]:
        """The tensors, on the device; until `release`.

        Raises:
            ModelError: after `release`, when others may have their memory.
        """
        ...

    def release(self) -> None:
        """They are not needed any more."""
        ...


class Inputs(Protocol):
    """Keeps inputs from forward to backward."""

    def keep(self, tensors: Sequence[Tensor]) -> Kept:
        """Keeps the inputs of one call."""
        ...


class DeviceInputs:
    """Leaves them where they are."""

    def keep(self, tensors: Sequence[Tensor]) -> Kept:
        """Keeps the inputs of one call."""
        return _OnDevice(list(tensors))


class _OnDevice:
    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors: list[Tensor] | None = tensors

    def get(self) -> list[Tensor]:
        if self._tensors is None:
            raise _released()
        return self._tensors

    def release(self) -> None:
        self._tensors = None


class HostInputs:
    """Sends the hidden states to host memory, and fetches each while the block after it is computed.

    Args:
        lanes: The lanes that copy.
        device: Where the blocks are computed.
    """

    def __init__(self, lanes: Lanes, device: torch.device) -> None:
        self.lanes = lanes
        self._device = device
        self._spare_homes: list[Tensor] = []
        self._spare_buffers: deque[tuple[Tensor, Event]] = deque()
        self._leaving: deque[tuple[Tensor, Event]] = deque()
        self._coming: deque[tuple[Tensor, Event]] = deque()
        self._waiting: list[weakref.ref[_InHost]] = []  # in the order of the forward pass

    def keep(self, tensors: Sequence[Tensor]) -> Kept:
        """Keeps the inputs of one call."""
        if not tensors:
            return _OnDevice([])
        hidden = tensors[0].contiguous()
        home, sent = self._send(hidden)
        kept = _InHost(self, home, sent, hidden.shape, hidden.dtype, list(tensors[1:]))
        self._waiting = [reference for reference in self._waiting if reference() is not None]
        self._waiting.append(weakref.ref(kept))
        return kept

    def _send(self, hidden: Tensor) -> tuple[Tensor, Event]:
        home = next((spare for spare in self._spare_homes if spare.nbytes == hidden.nbytes), None)
        if home is None:
            home = torch.empty(hidden.nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        else:
            self._spare_homes = [spare for spare in self._spare_homes if spare is not home]
        target, source = home, hidden.view(-1).view(torch.uint8)
        done = self.lanes.submit("inputs out", lambda: _copy(target, source), [self.lanes.mark()])
        self._hold(self._leaving, hidden, done)
        return home, done

    def _hold(self, copied: deque[tuple[Tensor, Event]], tensor: Tensor, done: Event) -> None:
        """Holds what is being copied: the memory of a tensor that nobody references is used again at once."""
        copied.append((tensor, done))
        while len(copied) > AHEAD:
            self.lanes.wait(copied.popleft()[1])

    def fetch(self, kept: _InHost) -> None:
        """Starts to copy a hidden state back."""
        if kept.buffer is not None:
            return
        buffer, free = self._spare_buffers.popleft() if self._spare_buffers else (None, None)
        if buffer is None or buffer.nbytes != kept.home.nbytes:
            buffer, free = torch.empty(kept.home.nbytes, dtype=torch.uint8, device=self._device), self.lanes.mark()
        target, source = buffer, kept.home
        kept.buffer = buffer
        kept.arrived = self.lanes.submit("inputs in", lambda: _copy(target, source), [free, kept.sent])
        self._hold(self._coming, buffer, kept.arrived)  # a backward pass that fails never asks for it

    def fetch_before(self, kept: _InHost) -> None:
        """Starts to copy back what will be asked for next: the pass goes backwards."""
        alive = [each for reference in self._waiting if (each := reference()) is not None]
        index = alive.index(kept) if kept in alive else 0
        if index:
            self.fetch(alive[index - 1])

    def done_with(self, kept: _InHost) -> None:
        """Takes its memory for the next ones."""
        self._waiting = [reference for reference in self._waiting if reference() not in (None, kept)]
        self._spare_homes.append(kept.home)
        if kept.buffer is not None:
            self._spare_buffers.append((kept.buffer, self.lanes.mark()))
            kept.buffer = None


class _InHost:
    def __init__(
        self, inputs: HostInputs, home: Tensor, sent: Event, shape: torch.Size, dtype: torch.dtype, others: list[Tensor]
    ) -> None:
        self._inputs = inputs
        self._shape, self._dtype, self._others = shape, dtype, others
        self.home, self.sent = home, sent
        self.buffer: Tensor | None = None
        self.arrived: Event = None
        self._is_released = False

    def get(self) -> list[Tensor]:
        if self._is_released:
            raise _released()
        self._inputs.fetch(self)
        self._inputs.fetch_before(self)
        self._inputs.lanes.wait(self.arrived)
        assert self.buffer is not None
        return [self.buffer.view(self._dtype).view(self._shape), *self._others]

    def release(self) -> None:
        if not self._is_released:
            self._inputs.done_with(self)
        self._is_released = True


def _released() -> ModelError:
    return ModelError(
        "A second backward pass through one forward pass of a streamed block: its input is kept for one only.",
        "Compute the loss again before each backward pass, without `retain_graph`.",
    )


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
