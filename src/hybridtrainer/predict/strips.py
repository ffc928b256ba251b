"""Weights in strips: neighbouring buckets end to end, so that a window is taken in few operations.

A step of a model of a hundred million weights is some hundred launches; so must a window be, or it costs as much as a
step. A strip is as many buckets as may be copied on a device at one time. Each is filled up to whole blocks, so that
what is computed of a strip is, bucket by bucket, what would be computed of each alone. Host memory for what is taken
is asked for once and written again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtrainer.kernels.int8 import BLOCK, Quantized, dequantize
from hybridtrainer.weights import Bucket, Weights, host_buffers, working_dtype

STRIP_ELEMENTS = 1 << 24  # on a device beside the host; a CPU has nothing to launch, and a bucket fits its caches
SAMPLE_ELEMENTS = 1 << 19  # of a group, from which inner products are estimated: a cosine to a few thousandths


@dataclass(frozen=True)
class Strip:
    """Neighbouring buckets of one type and on one device.

    Attributes:
        first: Number of its first bucket.
        buckets: One after another.
        chosen: The blocks that stand for all of them, by number, on their device; None for all.
        counts: How many of the chosen blocks are in each bucket.
        shares: Of each bucket, how many blocks a chosen one stands for; on their device, as what is read.
    """

    first: int
    buckets: tuple[Bucket, ...]
    chosen: Tensor | None
    counts: tuple[int, ...]
    shares: Tensor

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.buckets[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights, in which they are kept in host memory."""
        return self.buckets[0].segments[0].parameter.dtype

    @property
    def blocks(self) -> tuple[int, ...]:
        """Of each bucket."""
        return tuple(blocks_of(bucket) for bucket in self.buckets)

    @property
    def is_beside(self) -> bool:
        """Whether its device works beside the host, which need not wait for large copies."""
        return runs_beside(self.device)

    def reader(self) -> Callable[[], Tensor]:
        """What gives the weights, each time as they are then: flat, fp32 (fp64 for fp64 weights), on their device."""
        if any(segment.home is not None for bucket in self.buckets for segment in bucket.segments):
            return lambda: self._joined(self._pieces())
        pieces = self._pieces()  # views
        return lambda: self._joined(pieces)

    def _pieces(self) -> list[Tensor]:
        pieces: list[Tensor] = []
        for bucket in self.buckets:
            pieces += [segment.read() for segment in bucket.segments]
            if bucket.elements % BLOCK:
                pieces.append(pieces[0].new_zeros(-bucket.elements % BLOCK))
        return pieces

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces)).to(working_dtype(pieces[0].dtype))

    def sample(self, values: Tensor) -> Tensor:
        """Of values of all elements those of the chosen blocks, flat."""
        return values if self.chosen is None else values.view(-1, BLOCK)[self.chosen].view(-1)

    def take(self, quantized: Quantized) -> Quantized:
        """The same of codes and scales."""
        codes, scales = quantized
        return (codes, scales) if self.chosen is None else (self.sample(codes), scales[self.chosen])

    def by_bucket(self, values: Tensor, unit: int) -> list[Tensor]:
        """Values of all blocks, `unit` of each, as views, one for each bucket."""
        return list(torch.split_with_sizes(values, [blocks * unit for blocks in self.blocks]))


def runs_beside(device: torch.device) -> bool:
    """Whether a device works beside the host."""
    return device.type == "cuda"


def blocks_of(bucket: Bucket) -> int:
    """How many blocks a bucket is, the last perhaps not full."""
    return -(-bucket.elements // BLOCK)


def strips_of(weights: Weights) -> list[Strip]:
    """All buckets, in their order."""
    chosen = choose_blocks(weights)
    found: list[Strip] = []
    start = 0
    for stop in range(1, len(weights.buckets) + 1):
        if stop < len(weights.buckets) and _fits(weights.buckets[start : stop + 1]):
            continue
        found.append(_strip(start, weights.buckets[start:stop], chosen[start:stop]))
        start = stop
    return found


def choose_blocks(weights: Weights) -> list[Tensor | None]:
    """For each bucket the blocks that stand for it, always the same, on the host; None for all of them."""
    generator = torch.Generator().manual_seed(0)
    elements = [0] * len(weights.groups)
    for bucket in weights.buckets:
        elements[bucket.group] += bucket.elements
    chosen: list[Tensor | None] = []
    for bucket in weights.buckets:
        blocks = blocks_of(bucket)
        share = SAMPLE_ELEMENTS / elements[bucket.group]
        some = torch.randperm(blocks, generator=generator)[: math.ceil(blocks * share)].sort().values
        chosen.append(some if share < 1 else None)
    return chosen


def anchor_buffers(strips: Sequence[Strip]) -> list[Tensor]:
    """Host memory for the weights of each strip."""
    return host_buffers([(sum(strip.blocks) * BLOCK, strip.dtype) for strip in strips], _pinned(strips))


def window_buffers(strips: Sequence[Strip]) -> list[Quantized]:
    """Host memory for the codes and scales of each strip."""
    sizes: list[tuple[int, torch.dtype]] = []
    for strip in strips:
        blocks = sum(strip.blocks)
        sizes += [(blocks * BLOCK, torch.int8), (blocks, working_dtype(strip.dtype))]
    made = host_buffers(sizes, _pinned(strips))
    return list(zip(made[::2], made[1::2], strict=True))


def joined(parts: Sequence[Quantized]) -> Quantized:
    """Codes and scales, one after another."""
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def inner_products(strip: Strip, directions: Sequence[Quantized]) -> Tensor:
    """Of each direction with the last, estimated from what was taken of them, (buckets, directions)."""
    rows = dequantize(*joined(directions)).view(len(directions), -1)
    parts = torch.split_with_sizes(rows, [BLOCK * count for count in strip.counts], dim=1)
    return torch.stack([part @ part[-1] for part in parts]) * strip.shares[:, None]


def _pinned(strips: Sequence[Strip]) -> bool:
    return any(strip.device.type == "cuda" for strip in strips)


def _fits(buckets: Sequence[Bucket]) -> bool:
    kinds = {(bucket.segments[0].parameter.dtype, bucket.device) for bucket in buckets}
    alike = len(kinds) == 1 and runs_beside(buckets[0].device)
    return alike and sum(bucket.elements for bucket in buckets) <= STRIP_ELEMENTS


def _strip(first: int, buckets: Sequence[Bucket], chosen: Sequence[Tensor | None]) -> Strip:
    found: list[Tensor] = []
    before = 0
    for bucket, some in zip(buckets, chosen, strict=True):
        found.append((torch.arange(blocks_of(bucket)) if some is None else some) + before)
        before += blocks_of(bucket)
    counts, device = [len(each) for each in found], buckets[0].device
    shares = [blocks_of(bucket) / count for bucket, count in zip(buckets, counts, strict=True)]
    return Strip(
        first, tuple(buckets), None if sum(counts) == before else torch.cat(found).to(device), tuple(counts),
        torch.tensor(shares, dtype=working_dtype(buckets[0].segments[0].parameter.dtype), device=device),
    )  # fmt: skip
