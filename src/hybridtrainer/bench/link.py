"""How fast bytes pass between host memory and the GPU, in each direction and in both at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridtrainer.memory.arena import Arena


@dataclass(frozen=True)
class Link:
    """Bandwidths in bytes per second; `both` is the sum of both directions at once."""

    inward: float
    outward: float
    both: float


def measure_link(device: torch.device, nbytes: int = 1 << 29, repeats: int = 5) -> Link:
    """Copies registered memory to the device and back."""
    arena = Arena(2 * nbytes, device)
    source, target = arena.take(nbytes).lanes, arena.take(nbytes).lanes
    first, second = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def inward() -> None:
        with torch.cuda.stream(streams[0]):
            first.copy_(source, non_blocking=True)

    def outward() -> None:
        with torch.cuda.stream(streams[1]):
            target.copy_(second, non_blocking=True)

    def both() -> None:
        inward()
        outward()

    link = Link(
        rate_of(inward, nbytes, repeats, device),
        rate_of(outward, nbytes, repeats, device),
        rate_of(both, 2 * nbytes, repeats, device),
    )
    torch.cuda.synchronize(device)
    arena.close()
    return link


def rate_of(work: Callable[[], object], amount: int, repeats: int, device: torch.device) -> float:
    """How much a GPU does in a second, of work that is so much each time; a first one is not timed."""
    work()
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize(device)
    return amount * repeats / (time.perf_counter() - started)
