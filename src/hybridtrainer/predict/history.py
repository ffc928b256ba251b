"""Where the weights have been: displacements over recent windows, one byte a parameter each, in host memory.

Beside each displacement its inner products with the others are kept, group by group. With those a forecaster
can weigh, compare and test any combination of windows without touching a weight. For a large group they are
estimated from a fixed random sample of its blocks, so that their cost does not grow with the model.

On a GPU nobody waits for the large copies: they are queued before the next step can change a weight, and who reads
host memory waits first. What the host has to know at once, the inner products, is computed before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridtrainer import ranks
from hybridtrainer.kernels.int8 import BLOCK, Quantized, dequantize, quantize
from hybridtrainer.predict.begun import on_its_way
from hybridtrainer.predict.strips import (
    Strip,
    anchor_buffers,
    blocks_of,
    inner_products,
    joined,
    strips_of,
    window_buffers,
)
from hybridtrainer.tree import Tree
from hybridtrainer.weights import Bucket, Weights

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
        self._strips = strips_of(weights)
        self._samples: list[list[Quantized]] = []  # of each window, of each strip the chosen blocks, on their device
        self._held: list[list[Quantized]] = []  # of each window, of each strip the host memory
        self._spare: list[Quantized] | None = None  # of a window that was dropped
        self._anchors: list[Tensor] | None = None  # of each strip, in host memory
        self._anchor_samples: list[Tensor] = []  # of each strip, on its device where that works beside the host
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
        anchors = anchors or anchor_buffers(self._strips)
        self._anchor_samples = [
            _move_anchor(strip, anchor, strip.reader()()) for strip, anchor in zip(self._strips, anchors, strict=True)
        ]
        return anchors

    def leave_open_window(self) -> None:
        """Forgets that a window was opened."""
        self._anchors, self._steps, self._lr_time = None, 0, []
        self._anchor_samples = []

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
        oldest = max(0, len(self.windows) - self.capacity + 1)
        samples: list[Quantized] = []
        found = ranks.together("window", lambda: self._measure(samples, oldest))
        dots = self._of_all_ranks(found, len(self.windows) - oldest + 1)
        held, self._spare = self._spare or [], self._held[0] if oldest else None
        self._held, self._samples = [*self._held[oldest:], held], [*self._samples[oldest:], samples]
        self.windows = [*self.windows[oldest:], self._window(self._steps, tuple(self._lr_time), held)]
        self.gram = _extend(self.gram, dots)
        self._steps, self._lr_time = 0, []

    def _measure(self, samples: list[Quantized], oldest: int) -> list[list[float]]:
        """Makes the window and starts the next; returns its inner products with those that stay, (groups, windows)."""
        held = self._spare = self._spare or window_buffers(self._strips)
        later: list[Callable[[], object]] = []
        for index, strip in enumerate(self._strips):
            read = strip.reader()
            store = partial(self._store, index, read, held[index])
            if strip.is_beside:
                now = strip.sample(read())
                samples.append(quantize(now - self._anchor_samples[index].to(now.dtype)))
                later.append(store)
            else:
                samples.append(strip.take(store()))
        products = self._products(samples, self._samples[oldest:])
        for queue in later:
            queue()
        return products()

    def _store(self, index: int, read: Callable[[], Tensor], held: Quantized) -> Quantized:
        """Queues the displacement of a strip for host memory, and the weights from which it goes on."""
        assert self._anchors is not None
        anchor, now = self._anchors[index], read()
        then = anchor.to(now.device, non_blocking=True).to(now.dtype)  # its type changes on the device
        moved = torch.sub(now, then, out=None if then is anchor else then)
        self._anchor_samples[index] = _move_anchor(self._strips[index], anchor, now)
        del now, then
        found = quantize(moved)
        for host, made in zip(held, found, strict=True):
            host.copy_(made, non_blocking=True)
        return found

    def _window(self, steps: int, lr_time: tuple[float, ...], held: list[Quantized]) -> Window:
        pairs = list(zip(self._strips, held, strict=True))
        codes = [part for strip, (whole, _) in pairs for part in strip.by_bucket(whole, BLOCK)]
        scales = [part for strip, (_, whole) in pairs for part in strip.by_bucket(whole, 1)]
        return Window(steps, lr_time, tuple(codes), tuple(scales))

    def _of_all_ranks(self, found: list[list[list[float]]], count: int) -> Tensor:
        """Shards have each a part of every inner product; copies have them all, and those of one count for all."""
        dots = torch.tensor(found if self.weights.sharded else found[:1], dtype=torch.float64).sum(dim=0)
        return dots.reshape(len(self.weights.groups), count)

    @torch.no_grad()
    def sample(self, direction: Callable[[Bucket], Tensor]) -> Sample:
        """A direction that is no window, as far as it is needed to compare it with windows."""
        found: Sample = []
        for strip in self._strips:
            values = [pad(direction(bucket), (0, -bucket.elements % BLOCK)) for bucket in strip.buckets]
            codes, scales = quantize(strip.sample(torch.cat(values)))
            codes_of = torch.split_with_sizes(codes, [BLOCK * count for count in strip.counts])
            found += zip(codes_of, torch.split_with_sizes(scales, strip.counts), strict=True)
        return found

    @torch.no_grad()
    def compare(self, direction: Sample) -> Tensor:
        """Inner products of a direction with every window and with itself, (groups, windows + 1)."""
        found = ranks.together("direction", lambda: self._with_all_windows(direction))
        return self._of_all_ranks(found, len(self.windows) + 1)

    def _with_all_windows(self, direction: Sample) -> list[list[float]]:
        own = [joined(direction[strip.first : strip.first + len(strip.buckets)]) for strip in self._strips]
        return self._products(own, self._samples)()

    def _products(self, newest: list[Quantized], before: list[list[Quantized]]) -> Callable[[], list[list[float]]]:
        """Begins to multiply a direction with others and with itself; who calls the result waits for that alone."""
        parts: dict[tuple[torch.device, torch.dtype], list[tuple[Strip, Tensor]]] = {}
        for index, strip in enumerate(self._strips):
            product = inner_products(strip, [*(window[index] for window in before), newest[index]])
            parts.setdefault((product.device, product.dtype), []).append((strip, product))
        told = [on_its_way([torch.cat([product for _, product in alike])]) for alike in parts.values()]

        def products() -> list[list[float]]:
            by_bucket: dict[int, list[float]] = {}
            for alike, arrived in zip(parts.values(), told, strict=True):
                numbers = [strip.first + place for strip, _ in alike for place in range(len(strip.buckets))]
                by_bucket |= zip(numbers, arrived()[0].tolist(), strict=True)
            dots = [[0.0] * (len(before) + 1) for _ in self.weights.groups]
            for number, bucket in enumerate(self.weights.buckets):
                dots[bucket.group] = [a + b for a, b in zip(dots[bucket.group], by_bucket[number], strict=True)]
            return dots

        return products

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
        self.weights.wait_for_copies()
        return {
            "windows": [vars(window) for window in self.windows],
            "gram": self.gram,
            "anchors": None if self._anchors is None else self._anchors_by_bucket(self._anchors),
            "steps": self._steps,
            "lr_time": self._lr_time,
        }

    def _anchors_by_bucket(self, anchors: list[Tensor]) -> list[Tensor]:
        pairs = zip(self._strips, anchors, strict=True)
        padded = [part for strip, anchor in pairs for part in strip.by_bucket(anchor, BLOCK)]
        return [part[: bucket.elements] for part, bucket in zip(padded, self.weights.buckets, strict=True)]

    def restore(self, state: Tree) -> None:
        """Puts back what `state` returned; windows of weights that were divided otherwise are of no use, and left."""
        self.leave_open_window()
        self.windows, self._held, self._samples = [], [], []
        if not self._fits(state):
            self.gram = self.gram.new_zeros(len(self.weights.groups), 0, 0)
            return
        for saved in state["windows"]:
            held = window_buffers(self._strips)
            window = self._window(saved["steps"], tuple(saved["lr_time"]), held)
            for part, value in zip((*window.codes, *window.scales), (*saved["codes"], *saved["scales"]), strict=True):
                part.copy_(value)
            self.windows.append(window)
            self._held.append(held)
            self._samples.append(
                [
                    strip.take((codes.to(strip.device), scales.to(strip.device)))
                    for strip, (codes, scales) in zip(self._strips, held, strict=True)
                ]
            )
        self.gram = state["gram"].clone()
        if state["anchors"] is not None:
            self._anchors = [anchor.zero_() for anchor in anchor_buffers(self._strips)]
            for part, value in zip(self._anchors_by_bucket(self._anchors), state["anchors"], strict=True):
                part.copy_(value)
            pairs = zip(self._strips, self._anchors, strict=True)
            self._anchor_samples = [_sample_anchor(strip, anchor.to(strip.device)) for strip, anchor in pairs]
        self._steps, self._lr_time = state["steps"], list(state["lr_time"])

    def _fits(self, state: Tree) -> bool:
        elements = [bucket.elements for bucket in self.weights.buckets]
        blocks = [blocks_of(bucket) for bucket in self.weights.buckets]
        anchors = state["anchors"]
        return all([len(scale) for scale in window["scales"]] == blocks for window in state["windows"]) and (
            anchors is None or [len(anchor) for anchor in anchors] == elements
        )


def _move_anchor(strip: Strip, anchor: Tensor, now: Tensor) -> Tensor:
    """Queues the present weights of a strip for host memory; returns those that stay on the device."""
    now = now.to(anchor.dtype)
    anchor.copy_(now, non_blocking=True)
    return _sample_anchor(strip, now)


def _sample_anchor(strip: Strip, weights: Tensor) -> Tensor:
    """Where the device works beside the host: the chosen blocks, from which inner products are made at once."""
    return strip.sample(weights) if strip.is_beside else weights.new_empty(0)


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
