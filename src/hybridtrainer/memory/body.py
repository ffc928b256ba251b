"""A block run with weights from elsewhere, in chunks of samples, forward and again with a graph for its gradients.

This module knows nothing of slots and copies: it gets weights and tensors on a device and returns tensors on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.memory.calls import Call, Result, in_chunks, samples_of
from hybridtrainer.memory.division import Division, require_samples
from hybridtrainer.memory.side_ways import (
    buffers_of,
    require_closed,
    require_nothing_left,
    require_result,
    require_steady,
)

CPU_STATE_BYTES = len(torch.get_rng_state())


@dataclass(frozen=True)
class Surroundings:
    """What a recomputation must find as the forward pass did: random numbers, autocast, and the division into chunks.

    Attributes:
        random: The generators' state when the forward pass began.
        drew_random_numbers: Whether that pass used any; then it must be divided as it was.
        chunk_samples: How it was divided.
    """

    device: torch.device
    random: Tensor
    drew_random_numbers: bool
    chunk_samples: int
    autocast: bool
    autocast_dtype: torch.dtype

    @staticmethod
    def of(device: torch.device, random: Tensor, chunk_samples: int) -> Surroundings:
        """Those of a forward pass that has just ended and began with `random`."""
        return Surroundings(
            device,
            random,
            not torch.equal(random, get_random(device)),
            chunk_samples,
            torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type),
        )

    @contextmanager
    def again(self, before: Tensor) -> Iterator[None]:
        """Inside, all is as it was; afterwards the random numbers go on from `before`."""
        set_random(self.device, self.random)
        try:
            with torch.autocast(self.device.type, self.autocast_dtype, self.autocast):
                yield
        finally:
            set_random(self.device, before)


class Body:
    """A block's own forward, with its parameters lent to it.

    Args:
        block: The block. Its `forward` as it is now is what runs.
        names: Its parameters, in the order in which weights will be passed.
        division: What is known of dividing its calls; blocks that are alike share it.
    """

    def __init__(self, block: nn.Module, names: Sequence[str], division: Division | None = None) -> None:
        self._block = block
        self._forward = block.forward
        self._division = Division() if division is None else division
        self._is_steady = self._is_closed = False  # whether it was seen to be, in its first run and its first backward
        self._places = [_places(block, block.get_parameter(name)) for name in names]

    def forward(
        self, weights: Sequence[Tensor], call: Call, tensors: Sequence[Tensor], chunk: int
    ) -> tuple[Result, list[Tensor]]:
        """The block's result, without a graph."""
        results = []
        self._require_divisible(weights, call, tensors, chunk)
        is_first = not self._is_steady and self._block.training and not torch.is_inference_mode_enabled()
        buffers = buffers_of(self._block) if is_first else []
        with torch.no_grad():
            for piece in in_chunks(tensors, chunk):
                results.append(Result.of(self._run(weights, call, piece)))
                if chunk < samples_of(tensors):
                    require_result(results[-1][0], call)
                    require_samples(results[-1][1], samples_of(piece))
            if is_first:
                require_steady(self._block, buffers, partial(self._run, weights, call, piece))
                self._is_steady = True
        return results[0][0], _joined([found for _, found in results])

    def gradients(
        self,
        weights: Sequence[Tensor],
        trainable: Sequence[bool],
        call: Call,
        tensors: Sequence[Tensor],
        needs_grad: Sequence[bool],
        output_grads: Sequence[Tensor | None],
        chunk: int,
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Gradients of the tensors that need one (None for the others) and of the trainable weights.

        The weights' gradients of several chunks are summed in fp32.
        """
        leaves = [weight.detach().requires_grad_(each) for weight, each in zip(weights, trainable, strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        sums: list[Tensor] = []
        pieces: list[list[Tensor | None]] = []
        start = 0
        if not wanted and not any(needs_grad):  # all is frozen, up to here
            return [None] * len(tensors), []
        self._require_divisible(weights, call, tensors, chunk)
        for piece in in_chunks(tensors, chunk):
            samples = samples_of(piece)
            inputs = [tensor.detach().requires_grad_(each) for tensor, each in zip(piece, needs_grad, strict=True)]
            sources = [tensor for tensor in inputs if tensor.requires_grad]
            with torch.enable_grad():
                _, outputs = Result.of(self._run(leaves, call, inputs))
            if not self._is_closed:
                require_closed(outputs, [*inputs, *leaves])
                require_nothing_left(self._block)
                self._is_closed = True
            chosen = [
                (output, _slice(grad, start, samples, output))
                for output, grad in zip(outputs, output_grads, strict=True)
                if grad is not None and output.requires_grad
            ]
            found = torch.autograd.grad(
                [output for output, _ in chosen],
                [*sources, *wanted],
                [grad for _, grad in chosen],
                allow_unused=True,
            )
            of_inputs = iter(found[: len(sources)])
            pieces.append([next(of_inputs) if tensor.requires_grad else None for tensor in inputs])
            _accumulate(sums, found[len(sources) :], wanted, is_only=samples == samples_of(tensors))
            start += samples
        return _joined_grads(pieces, tensors), sums

    def _require_divisible(self, weights: Sequence[Tensor], call: Call, tensors: Sequence[Tensor], chunk: int) -> None:
        if chunk >= samples_of(tensors) or tensors[0].is_meta:  # a rehearsal has no numbers to compare
            return

        def run(piece: Sequence[Tensor]) -> list[Tensor]:
            return Result.of(self._run(weights, call, piece))[1]

        self._division.require(self._block, call, tensors, run, _coarsest([*weights, *tensors]))

    def _run(self, weights: Sequence[Tensor], call: Call, tensors: Sequence[Tensor]) -> Any:
        args, kwargs = call.arguments(tensors)
        own = [places[0][0][places[0][1]] for places in self._places]
        self._lend(weights)
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._lend(own)

    def _lend(self, weights: Sequence[Tensor]) -> None:
        for places, weight in zip(self._places, weights, strict=True):
            for parameters, leaf in places:
                parameters[leaf] = weight


def _places(block: nn.Module, parameter: nn.Parameter) -> list[tuple[dict[str, Any], str]]:
    """Everywhere in the block where the parameter is; one that is tied has several places."""
    return [
        (module._parameters, leaf)
        for module in block.modules()
        for leaf, each in module._parameters.items()
        if each is parameter
    ]


def get_random(device: torch.device) -> Tensor:
    """The state of the generators that a block may draw from: the CPU's, and after it the device's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def set_random(device: torch.device, state: Tensor) -> None:
    """Puts it back."""
    torch.set_rng_state(state[:CPU_STATE_BYTES])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[CPU_STATE_BYTES:], device)


def _accumulate(sums: list[Tensor], found: Sequence[Tensor | None], like: Sequence[Tensor], *, is_only: bool) -> None:
    grads = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, like, strict=True)]
    if is_only:
        sums[:] = grads
    elif not sums:
        sums[:] = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    else:
        torch._foreach_add_(sums, grads)


def _coarsest(tensors: Sequence[Tensor]) -> float:
    """To how much a number of the coarsest type in use is rounded."""
    types = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        types.add(torch.get_autocast_dtype(kind))
    return max((torch.finfo(dtype).eps for dtype in types), default=0.0)


def _slice(grad: Tensor, start: int, samples: int, output: Tensor) -> Tensor:
    return grad if grad.shape == output.shape else grad[start : start + samples]


def _joined(results: Sequence[list[Tensor]]) -> list[Tensor]:
    if len(results) == 1:
        return results[0]
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def _joined_grads(pieces: Sequence[list[Tensor | None]], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    if len(pieces) == 1:
        return pieces[0]
    joined: list[Tensor | None] = []
    for parts, tensor in zip(zip(*pieces, strict=True), tensors, strict=True):
        present = [part for part in parts if part is not None]
        if not present:
            joined.append(None)
        elif present[0].shape == tensor.shape:  # every chunk had all of it
            joined.append(torch.stack(present).sum(dim=0))
        else:
            joined.append(torch.cat(present))
    return joined
