"""Small computations that are always the same: on a GPU recorded once and repeated in one launch.

A model of the training dynamics is some hundred tiny kernels, and each costs the host more to launch than the device
to run. A CUDA graph launches them all at once. It reads and writes the same memory every time, so what goes in is put
into tensors that stay where they are, here called a mailbox. On a CPU, and where a graph cannot be recorded, the same
computation runs on the same tensors step by step: the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridtrainer.weights import host_buffers

RUNS_BEFORE = 3  # that a computation is run step by step: libraries set themselves up, optimizers make their state


class Repeated:
    """A computation without arguments or results, which reads and writes tensors that stay where they are.

    What it does in Python beside that is done while it runs step by step, and not any more when it is repeated.

    Args:
        work: The computation. It must not wait for the device, and draw no random numbers there.
        device: Where its tensors are.

    >>> total = torch.zeros(())
    >>> add = Repeated(lambda: total.add_(2.0), "cpu")
    >>> for _ in range(5):
    ...     add()
    >>> total.item()
    10.0
    """

    def __init__(self, work: Callable[[], object], device: torch.device | str) -> None:
        self._work = work
        self._device = torch.device(device)
        self._may_record = self._device.type == "cuda"
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Runs it."""
        ready = self._may_record and self._graph is None and self._runs >= RUNS_BEFORE
        if ready and not torch.is_anomaly_enabled():  # which waits for the device in every backward pass
            self._graph = self._recorded()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._work()
            self._runs += 1

    @property
    def is_recorded(self) -> bool:
        """Whether it is repeated in one launch."""
        return self._graph is not None

    def forget(self) -> None:
        """Some of its tensors are others now: it is recorded anew."""
        self._graph, self._runs = None, 0

    def _recorded(self) -> torch.cuda.CUDAGraph | None:
        """The computation as a graph; None where it cannot be one. It is not run."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        beside.wait_stream(current)
        try:
            with torch.cuda.stream(beside):
                # Other threads, that of a data loader for one, may ask CUDA for memory meanwhile.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._work()
                finally:
                    graph.capture_end()
        except RuntimeError:  # no memory, or something in it that cannot be recorded
            self._may_record = False
            return None
        current.wait_stream(beside)
        return graph


class Mailbox:
    """Tensors that stay where they are on a device, filled from the host with one copy for each type.

    Args:
        device: Where they are.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._host: list[Tensor] = []  # of each part
        self._sent: dict[torch.dtype, tuple[Tensor, Tensor]] = {}  # all parts of a type, on the host and the device
        self._parts: tuple[Tensor, ...] = ()
        self._read: torch.cuda.Event | None = None  # when the device has what was put in last

    def put(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Sends values of the host; returns the tensors that have them, the same ones while shapes and types are."""
        layout = [(value.shape, value.dtype) for value in values]
        if layout != self._layout:
            self._lay_out(layout)
        if self._read is not None:
            self._read.synchronize()
        for host, value in zip(self._host, values, strict=True):
            host.copy_(value)
        if self._device.type == "cuda":
            for host, there in self._sent.values():
                there.copy_(host, non_blocking=True)
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record(torch.cuda.current_stream(self._device))
        return self._parts

    def _lay_out(self, layout: list[tuple[torch.Size, torch.dtype]]) -> None:
        self._layout, self._host, self._sent = layout, [], {}
        parts: dict[int, tuple[Tensor, Tensor]] = {}
        for dtype in {dtype: None for _, dtype in layout}:
            places = [place for place, (_, other) in enumerate(layout) if other == dtype]
            sizes = [layout[place][0].numel() for place in places]
            (host,) = host_buffers([(sum(sizes), dtype)], pinned=self._device.type == "cuda")
            there = torch.empty_like(host, device=self._device) if self._device.type == "cuda" else host
            self._sent[dtype] = host, there
            both = zip(torch.split_with_sizes(host, sizes), torch.split_with_sizes(there, sizes), strict=True)
            parts |= zip(places, both, strict=True)
        self._host = [parts[place][0].view(shape) for place, (shape, _) in enumerate(layout)]
        self._parts = tuple(parts[place][1].view(shape) for place, (shape, _) in enumerate(layout))
