"""Copies that run beside the computation: lanes inward and outward, and the events that order them.

Work in a lane waits for the work before it. States that wait for their slot must not hold up the weights that are
needed sooner, and states that leave must not hold up the slots of weights, so each kind has lanes of its own.

On a GPU lanes are CUDA streams; on a CPU they are threads, so that what would be a race on a GPU is one here too, and
tests can find it. This module knows nothing of what is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol, get_args

import torch

Lane = Literal[
    "weights in", "weights out", "states in", "states out", "inputs in", "inputs out", "packing", "unpacking"
]
LANES: tuple[Lane, ...] = get_args(Lane)
URGENT: tuple[Lane, ...] = ("packing", "unpacking")  # short computations that copies wait for
Event = Any
"""A point in a lane or in the computation; None is one that is over."""


class Lanes(Protocol):
    """Lanes beside the computation, by what they carry and where to."""

    def mark(self) -> Event:
        """The point that the computation has reached."""
        ...

    def wait(self, event: Event) -> None:
        """Lets the computation go on only after the event."""
        ...

    def submit(self, lane: Lane, work: Callable[[], Any], after: Sequence[Event]) -> Event:
        """Queues work in a lane, to begin after the events. Returns the event of its end."""
        ...

    def finish(self) -> None:
        """Returns when all lanes are empty, so that the host may read what they wrote."""
        ...

    def watch_stalls(self) -> None:
        """From now on measures how long the computation waits."""
        ...

    def stalled_seconds(self) -> float:
        """How long it has waited since `watch_stalls`; ends the measurement and waits for the device."""
        ...


class CudaLanes:
    """Streams, made once: each new stream would grow the allocator's pools."""

    def __init__(self, device: torch.device, delay: Callable[[Lane], None] | None = None) -> None:
        self._device = device
        self._streams = {lane: torch.cuda.Stream(device, priority=-(lane in URGENT)) for lane in LANES}  # type: ignore[no-untyped-call]
        self._delay = delay
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None

    def mark(self) -> Event:
        """The point that the computation has reached."""
        event = _event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        """Lets the computation go on only after the event."""
        if event is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stalls is None:
            stream.wait_event(event)
            return
        before, after = _event(timed=True), _event(timed=True)
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._stalls.append((before, after))

    def submit(self, lane: Lane, work: Callable[[], Any], after: Sequence[Event]) -> Event:
        """Queues work in a lane."""
        stream = self._streams[lane]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with stream:  # does what `torch.cuda.stream` does, without the calls of Python around it
            if self._delay is not None:
                self._delay(lane)
            work()
        done = _event()
        done.record(stream)
        return done

    def finish(self) -> None:
        """Waits for all streams."""
        for stream in self._streams.values():
            stream.synchronize()

    def watch_stalls(self) -> None:
        """Puts timed events around each wait."""
        self._stalls = []

    def stalled_seconds(self) -> float:
        """The sum over all waits."""
        torch.cuda.current_stream(self._device).synchronize()
        found, self._stalls = self._stalls or [], None
        return math.fsum(before.elapsed_time(after) for before, after in found) / 1000


def _event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


class ThreadLanes:
    """Threads."""

    def __init__(self, delay: Callable[[Lane], None] | None = None) -> None:
        self._pools = {lane: ThreadPoolExecutor(1, f"copies-{lane}") for lane in LANES}
        self._delay = delay

    def mark(self) -> Event:
        """Nothing to wait for: a CPU computes as it goes."""
        return None

    def wait(self, event: Event) -> None:
        """Waits for the event; an error in the lane is raised here."""
        if event is not None:
            event.result()

    def submit(self, lane: Lane, work: Callable[[], Any], after: Sequence[Event]) -> Future[None]:
        """Queues work in a lane."""

        def ordered() -> None:
            for event in after:
                if event is not None:
                    event.result()
            if self._delay is not None:
                self._delay(lane)
            work()

        return self._pools[lane].submit(ordered)

    def finish(self) -> None:
        """Waits for all threads."""
        for pool in self._pools.values():
            pool.submit(lambda: None).result()

    def watch_stalls(self) -> None:
        """A CPU's times would say nothing."""

    def stalled_seconds(self) -> float:
        """Nothing measured."""
        return 0.0


def make_lanes(device: torch.device, delay: Callable[[Lane], None] | None = None) -> Lanes:
    """The lanes of a device; `delay` is called in a lane before each piece of work, for tests."""
    return CudaLanes(device, delay) if device.type == "cuda" else ThreadLanes(delay)
