"""Where the weights have been: displacements over recent windows, one byte a parameter each, in host memory.

Beside each displacement its inner products with the others are kept, group by group. With those a forecaster
can weigh, compare and test any combination of windows without touching a weight. For a large group they are
estimated from a fixed random sample of its blocks, so that their cost does not grow with the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrainer import ranks
from hybridtrainer.kernels.int8 import BLOCK, Quantized, dequantize, quantize
from hybridtrainer.tree import Tree
from hybridtrainer.weights import Bucket, Weights

SAMPLE_ELEMENTS = 1 << 19  # of a group, from which inner products are estimated: a cosine to a few thousandths


Sample = list[Quantized]
"""Of a direction: of each bucket the blocks that stand for it, on the bucket's device."""


@dataclass(frozen=True)
class Window:
    """The displacement over some real steps: 8-bit codes and block scales for each bucket.

    Attributes:
        steps: How many real steps it spans.
        lr_time: The sum of the learning rate over those steps, for each group of the optimizer.
    """

    steps: int
    lr_time: tuple[float, ...]
    codes: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]


class WindowHistory:
    """The newest windows of a run, oldest first.

    A window is opened at some weights and closed at later ones. Nothing here decides when.

    Args:
        weights: What is watched.
        capacity: How many windows are kept.

    Attributes:
        copies: How often all weights were copied to host memory.
    """

    def __init__(self, weights: Weights, capacity: int) -> None:
        self.copies = 0
        self.weights = weights
        self.capacity = capacity
        self.windows: list[Window] = []
        self.gram = torch.zeros(len(weights.groups), 0, 0, dtype=torch.float64)  # (groups, windows, windows)
        self._sample_blocks = _choose_blocks(weights)
        self._samples: list[Sample] = []  # of each window
        self._anchors: list[Tensor] | None = None
        self._steps = 0
        self._lr_time: list[float] = []

    @property
    def is_open(self) -> bool:
        """Whether a window has been opened and not closed."""
        return self._anchors is not None

    @property
    def open_steps(self) -> int:
        """Real steps since the window was opened."""
        return self._steps

    @torch.no_grad()
    def open(self) -> None:
        """Starts a window at the present weights. If that fails, none is open."""
        anchors = self._anchors
        self.leave_open_window()
        self._anchors = ranks.each("start of a window", lambda: self._copied(anchors))
        self.copies += 1

    def _copied(self, anchors: list[Tensor] | None) -> list[Tensor]:
        anchors = anchors or [_host_buffer(bucket) for bucket in self.weights.buckets]
        for anchor, bucket in zip(anchors, self.weights.buckets, strict=True):
            anchor.copy_(bucket.read(), non_blocking=True)
        self.weights.wait_for_copies()
        return anchors

    def leave_open_window(self) -> None:
        """Forgets that a window was opened."""
        self._anchors, self._steps, self._lr_time = None, 0, []

    def count_step(self, learning_rates: Sequence[float]) -> None:
        """Counts one real step, made with these learning rates."""
        self._steps += 1
        before = self._lr_time or [0.0] * len(learning_rates)
        self._lr_time = [time + rate for time, rate in zip(before, learning_rates, strict=True)]

    @torch.no_grad()
    def close(self) -> None:
        """Ends the window at the present weights, and starts the next one there. One without steps goes on."""
        assert self._anchors is not None
        if not self._steps:
            return
        self.copies += 1
        made: list[Window] = []
        oldest = max(0, len(self.windows) - self.capacity + 1)
        samples: Sample = []
        found = ranks.together("window", lambda: self._measure(made, samples, oldest).tolist())
        dots = self._of_all_ranks(found, len(self.windows) - oldest + 1)
        self.windows, self._samples = [*self.windows[oldest:], *made], [*self._samples[oldest:], samples]
        self.gram = _extend(self.gram, dots)
        self._steps, self._lr_time = 0, []

    def _measure(self, made: list[Window], samples: Sample, oldest: int) -> Tensor:
        """Makes the window and starts the next; returns its inner products with those that stay, (groups, windows)."""
        assert self._anchors is not None
        codes: list[Tensor] = []
        scales: list[Tensor] = []
        products: list[Tensor] = []  # of each bucket, on its device
        for index, (anchor, bucket) in enumerate(zip(self._anchors, self.weights.buckets, strict=True)):
            now = bucket.read()
            code, scale = quantize(now - anchor.to(now.device, now.dtype, non_blocking=True))
            anchor.copy_(now, non_blocking=True)
            samples.append(_take(code, scale, self._sample_blocks[index]))
            before = [past[index] for past in self._samples[oldest:]]
            products.append(_inner_products([*before, samples[-1]]) * (len(scale) / len(samples[-1][1])))
            codes.append(_to_host(code))
            scales.append(_to_host(scale))
        self.weights.wait_for_copies()
        dots = torch.zeros(len(self.weights.groups), len(self.windows) - oldest + 1, dtype=torch.float64)
        for bucket, product in zip(self.weights.buckets, products, strict=True):
            dots[bucket.group] += product.cpu().double()
        made.append(Window(self._steps, tuple(self._lr_time), tuple(codes), tuple(scales)))
        return dots

    def _of_all_ranks(self, found: list[list[list[float]]], count: int) -> Tensor:
        """Shards have each a part of every inner product; copies have them all, and those of one count for all."""
        dots = torch.tensor(found if self.weights.sharded else found[:1], dtype=torch.float64).sum(dim=0)
        return dots.reshape(len(self.weights.groups), count)

    @torch.no_grad()
    def sample(self, direction: Callable[[Bucket], Tensor]) -> Sample:
        """A direction that is no window, as far as it is needed to compare it with windows."""
        pairs = zip(self.weights.buckets, self._sample_blocks, strict=True)
        return [_take(*quantize(direction(bucket)), blocks) for bucket, blocks in pairs]

    @torch.no_grad()
    def compare(self, direction: Sample) -> Tensor:
        """Inner products of a direction with every window and with itself, (groups, windows + 1)."""
        found = ranks.together("direction", lambda: self._products(direction).tolist())
        return self._of_all_ranks(found, len(self.windows) + 1)

    def _products(self, direction: Sample) -> Tensor:
        dots = torch.zeros(len(self.weights.groups), len(self.windows) + 1, dtype=torch.float64)
        for index, bucket in enumerate(self.weights.buckets):
            share = -(-bucket.elements // BLOCK) / len(direction[index][1])
            rows = [*(window[index] for window in self._samples), direction[index]]
            dots[bucket.group] += (_inner_products(rows) * share).cpu().double()
        return dots

    @torch.no_grad()
    def displace_(self, coefficients: Tensor) -> None:
        """Adds a combination of the windows to the weights in place, bucket by bucket.

        Args:
            coefficients: (groups, windows), what each window counts in each group.
        """
        for index, bucket in enumerate(self.weights.buckets):
            chosen = coefficients[bucket.group].tolist()
            if not any(chosen):
                continue
            device = bucket.device
            pieces = (_load(w, index, device, c) for w, c in zip(self.windows, chosen, strict=True) if c)
            total = next(pieces)
            for piece in pieces:
                total += piece
            bucket.add_(total[: bucket.elements])

    def nbytes(self) -> int:
        """Host memory held by the windows, without the anchor."""
        return sum(t.nbytes for window in self.windows for t in (*window.codes, *window.scales))

    def state(self) -> Tree:
        """Everything, as a tree."""
        return {
            "windows": [vars(window) for window in self.windows],
            "gram": self.gram,
            "anchors": self._anchors,
            "steps": self._steps,
            "lr_time": self._lr_time,
        }

    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned; windows of weights that were divided otherwise are of no use, and left."""
        if not self._fits(state):
            self.windows, self._samples, self.gram = [], [], self.gram.new_zeros(len(self.weights.groups), 0, 0)
            self.leave_open_window()
            return
        self.windows = [
            Window(
                steps=window["steps"],
                lr_time=tuple(window["lr_time"]),
                codes=tuple(_to_host(code) for code in window["codes"]),
                scales=tuple(_to_host(scale) for scale in window["scales"]),
            )
            for window in state["windows"]
        ]
        self._samples = [
            [
                _take(codes.to(bucket.device), scales.to(bucket.device), blocks)
                for codes, scales, blocks, bucket in zip(
                    window.codes, window.scales, self._sample_blocks, self.weights.buckets, strict=True
                )
            ]
            for window in self.windows
        ]
        self.gram = state["gram"].clone()
        self._anchors = None
        if state["anchors"] is not None:
            self._anchors = [_host_buffer(bucket) for bucket in self.weights.buckets]
            for anchor, saved in zip(self._anchors, state["anchors"], strict=True):
                anchor.copy_(saved)
        self._steps, self._lr_time = state["steps"], list(state["lr_time"])

    def _fits(self, state: Tree) -> bool:
        elements = [bucket.elements for bucket in self.weights.buckets]
        blocks = [-(-count // BLOCK) for count in elements]
        anchors = state["anchors"]
        return all([len(scale) for scale in window["scales"]] == blocks for window in state["windows"]) and (
            anchors is None or [len(anchor) for anchor in anchors] == elements
        )


def _choose_blocks(weights: Weights) -> list[Tensor | None]:
    """For each bucket the blocks that stand for it, always the same; None for all of them."""
    generator = torch.Generator().manual_seed(0)
    elements = [0] * len(weights.groups)
    for bucket in weights.buckets:
        elements[bucket.group] += bucket.elements
    chosen: list[Tensor | None] = []
    for bucket in weights.buckets:
        blocks = -(-bucket.elements // BLOCK)
        share = SAMPLE_ELEMENTS / elements[bucket.group]
        some = torch.randperm(blocks, generator=generator)[: math.ceil(blocks * share)].sort().values
        chosen.append(some.to(bucket.device) if share < 1 else None)
    return chosen


def _take(codes: Tensor, scales: Tensor, blocks: Tensor | None) -> Quantized:
    return (codes, scales) if blocks is None else (codes.view(-1, BLOCK)[blocks].view(-1), scales[blocks])


def _inner_products(windows: Sequence[Quantized]) -> Tensor:
    """Of each with the last, (windows,)."""
    values = dequantize(torch.cat([codes for codes, _ in windows]), torch.cat([scales for _, scales in windows]))
    rows = values.view(len(windows), -1)
    return rows @ rows[-1]


def _load(window: Window, index: int, device: torch.device, factor: float = 1.0) -> Tensor:
    codes = window.codes[index].to(device, non_blocking=True)
    return dequantize(codes, window.scales[index].to(device, non_blocking=True), factor)


def _extend(gram: Tensor, dots: Tensor) -> Tensor:
    """The Gram matrices with the newest window added and the oldest dropped where there is no room."""
    kept = dots.shape[1] - 1
    extended = torch.empty(len(gram), kept + 1, kept + 1, dtype=torch.float64)
    extended[:, :kept, :kept] = gram[:, gram.shape[1] - kept :, gram.shape[2] - kept :]
    extended[:, kept, :] = dots
    extended[:, :, kept] = dots
    return extended


def _host_buffer(bucket: Bucket) -> Tensor:
    like = bucket.segments[0].view()
    return torch.empty(bucket.elements, dtype=like.dtype, pin_memory=like.is_cuda)


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
