"""The buffers of a model: remembered before a step, put back where it does not count. Knows no training."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class BufferGuard:
    """Remembers the buffers that steps change, so that a step that fails can be undone in them.

    Masks and other constants cost nothing: a buffer is copied again only if it was written to since the last time.
    Running statistics of norms are always copied, because torch writes them without counting a new version.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())  # walking the tree at every step would cost more than all the rest
        self._copies: dict[int, tuple[Tensor, Tensor, int]] = {}  # by id: the buffer, its copy, its version then
        self._held: list[tuple[nn.Module, dict[str, Tensor | None]]] = []  # which tensor had which name
        self._with_extra = [module for _, module in with_extra_state(model)]
        self._extra: list[Any] = []

    @torch.no_grad()
    def remember(self) -> None:
        """Takes note of the buffers as they are now."""
        known, self._copies = self._copies, {}
        for buffer, is_running in self._buffers():
            held = known.get(id(buffer))
            if held is None or held[1].shape != buffer.shape:
                with torch.inference_mode(mode=False):  # the caller may evaluate in it, and train on
                    copy = buffer.clone()
            else:
                copy = held[1]
                if is_running or held[2] != buffer._version:
                    copy.copy_(buffer)
            self._copies[id(buffer)] = (buffer, copy, buffer._version)
        self._held = [(module, dict(module._buffers)) for module in self._modules if module._buffers]
        self._extra = [deepcopy(module.get_extra_state()) for module in self._with_extra]

    @torch.no_grad()
    def put_back(self) -> None:
        """Undoes every change since the last `remember`."""
        for module, buffers in self._held:
            module._buffers.update(buffers)
        for module, extra in zip(self._with_extra, self._extra, strict=bool(self._extra)):
            module.set_extra_state(deepcopy(extra))
        for key, (buffer, copy, version) in self._copies.items():
            if buffer._version != version or not torch.equal(buffer, copy):
                buffer.copy_(copy)
                self._copies[key] = (buffer, copy, buffer._version)

    def _buffers(self) -> Iterator[tuple[Tensor, bool]]:
        for module in self._modules:
            if module._buffers:  # most have none, and this is asked at every step
                for buffer in module._buffers.values():
                    if buffer is not None:
                        yield buffer, isinstance(module, _NormBase)


def with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that keep more than parameters and buffers, by name."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module
