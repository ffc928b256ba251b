"""Every Triton kernel against its reference in plain torch: how much faster it is, and that both agree.

Sizes are those of one block of a small decoder, and of the dynamics model in its default size; packing has so many
weights that launches count for little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtrainer.kernels import adam, feature_reference, reference
from hybridtrainer.kernels.features import features
from hybridtrainer.kernels.formats import Format, state_fields, weight_dtype
from hybridtrainer.kernels.packed import GROUP, REST_BYTES, pack_, packed_bytes, unpack_
from hybridtrainer.kernels.reference import Hyper
from hybridtrainer.kernels.rollout import Cell, rollout, rollout_reference
from hybridtrainer.kernels.rotary import split_rotated
from hybridtrainer.kernels.swiglu import swiglu
from hybridtrainer.predict.dynamics import TICKS
from hybridtrainer.predict.rssm import CLASSES, Size

DEFAULT_SIZE = Size()
UPDATES: tuple[Format, ...] = ("split8", "sr4", "factored")
"""Of the ways in which optimizer states are kept, one of each sort of kernel."""


class Case(NamedTuple):
    """One kernel.

    Attributes:
        name: What it computes.
        kernel: Computes it with Triton.
        reference: Computes it without.
        on_cpu: The same on a CPU, where that is what the kernel stands in for.
    """

    name: str
    kernel: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    on_cpu: Callable[[], Tensor] | None = None


def measure_kernels(
    device: torch.device, calls: int = 100, rounds: int = 5, width: int = 1024, size: Size = DEFAULT_SIZE
) -> list[dict[str, Any]]:
    """Microseconds of a call of each kernel and its reference, and the largest difference between their results.

    Args:
        device: A GPU; a CPU only with Triton's interpreter, which says nothing of speed.
        calls: In each of the rounds.
        rounds: Of which the median counts.
        width: Of the tensors.
        size: Of the dynamics model.
    """
    rows = []
    with torch.no_grad():
        for case in cases(device, width, size):
            apart = (case.kernel().float() - case.reference().float()).abs().max().item()
            row: dict[str, Any] = {
                "kernel": case.name,
                "microseconds": _microseconds(case.kernel, calls, rounds, device),
                "reference_microseconds": _microseconds(case.reference, calls, rounds, device),
                "cpu_microseconds": case.on_cpu and _microseconds(case.on_cpu, calls, rounds, device),
                "largest_difference": apart,
            }
            rows.append(row)
    return rows


def cases(device: torch.device, width: int, size: Size) -> list[Case]:
    """All kernels that have a reference of their own."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = drawn(feature_reference.LENGTH, len(feature_reference.COLUMNS)).abs() + 0.5
    here = rows.to(device)
    d, categoricals, members = size
    z = categoricals * CLASSES
    shapes = ((z, 3 * d), (1, 3 * d), (d, 3 * d), (1, 3 * d), (d, z), (1, z))
    cell = Cell(*(drawn(members, *shape) / d**0.5 for shape in shapes))
    cell_here = Cell(*(part.to(device) for part in cell))
    start = torch.tanh(drawn(members, d)), torch.full((members, z), 1 / CLASSES)
    h, chances = (part.to(device) for part in start)
    ahead = TICKS[-1]
    hidden = drawn(width, 2 * width).to(device)
    qkv = drawn(1, width, 12, 64).to(device)
    return [
        Case(
            "features",
            lambda: features(here, 1000, use_triton=True),
            lambda: feature_reference.features(here, 1000),
            lambda: feature_reference.features(rows, 1000),
        ),
        Case(
            "rollout",
            lambda: rollout(cell_here, h, chances, ahead, CLASSES, use_triton=True),
            lambda: rollout_reference(cell_here, h, chances, ahead, CLASSES),
            lambda: rollout_reference(cell, *start, ahead, CLASSES),
        ),
        Case("swiglu", lambda: swiglu(hidden, use_triton=True), lambda: swiglu(hidden, use_triton=False)),
        Case(
            "rotary",
            lambda: split_rotated(qkv, 4, 4, use_triton=True)[0],
            lambda: split_rotated(qkv, 4, 4, use_triton=False)[0],
        ),
        *(_update(kind, drawn(width * width), width, device) for kind in UPDATES),
        *_packing(drawn(64 * width * width), device),
    ]


def _update(kind: Format, values: Tensor, width: int, device: torch.device) -> Case:
    """One optimizer step of a matrix that begins anew each time, so that both give the same."""
    hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1, seed=0, tensor=0)
    gradient = values.to(device)
    weight = values.to(device, weight_dtype(kind))
    state = {
        name: torch.zeros(length, dtype=dtype, device=device)
        for name, (dtype, length) in state_fields(kind, (width, width)).items()
    }
    scale, ok = torch.ones((), device=device), torch.ones((), dtype=torch.int32, device=device)

    def by(update: Callable[..., None], **options: bool) -> Tensor:
        mine, moments = weight.clone(), {name: tensor.clone() for name, tensor in state.items()}
        update(kind, mine, moments, gradient, hyper, scale, ok, **options)
        return mine

    return Case(f"update {kind}", lambda: by(adam.update_, use_triton=True), lambda: by(reference.update_))


def _packing(values: Tensor, device: torch.device) -> list[Case]:
    """Weights of 16 bits in 12.5 and back, into buffers that are there already."""
    raw = values.to(device, torch.bfloat16).view(torch.uint8)
    back = torch.empty_like(raw)
    groups = len(values) // GROUP
    sizes = (packed_bytes(len(values)), packed_bytes(len(values)), groups * REST_BYTES, groups)
    packed, again, rest, whole = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
    most = torch.zeros(1, dtype=torch.int32, device=device)
    pack_(raw, packed, rest, whole, most, use_triton=False)

    def pack(use_triton: bool) -> Tensor:
        pack_(raw, again, rest, whole, most, use_triton)
        return again

    def unpack(use_triton: bool) -> Tensor:
        unpack_(packed, rest, whole, back, use_triton)
        return back.view(torch.bfloat16)

    return [
        Case("pack", lambda: pack(True), lambda: pack(False)),
        Case("unpack", lambda: unpack(True), lambda: unpack(False)),
    ]


def describe(rows: list[dict[str, Any]]) -> str:
    """A line for each kernel."""
    lines = [
        f"{'kernel':16} {'us':>9} {'reference':>10} {'faster':>7} {'on a CPU':>9} {'faster':>7}  largest difference"
    ]
    for row in rows:
        own, plain, cpu = (row[name] for name in ("microseconds", "reference_microseconds", "cpu_microseconds"))
        beside = f"{cpu:9.1f} {cpu / own:6.1f}x" if cpu is not None else f"{'':9} {'':7}"
        lines.append(
            f"{row['kernel']:16} {own:9.1f} {plain:10.1f} {plain / own:6.1f}x {beside}  {row['largest_difference']:.1e}"
        )
    return "\n".join(lines)


def _microseconds(call: Callable[[], Tensor], calls: int, rounds: int, device: torch.device) -> float:
    """Median over rounds of the time of one call, the device waited for at the end of each round."""
    times = []
    for _ in range(rounds):
        _wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        _wait(device)
        times.append(1e6 * (time.perf_counter() - began) / calls)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
