"""The speeds of a GPU, its link and its host that a plan is made with, measured in half a minute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch

from hybridtrainer.bench.link import Link, measure_link, rate_of
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.models.gpt import build_gpt
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.calibration import Measured
from hybridtrainer.planning.resident import rehearse_resident

SIDE = 8192  # of the matrices: large enough for any card to be busy, three of them in 400 MB
ELEMENTS = 1 << 27
REPEATS = 20
SAMPLES, CONTEXT = 2, 64  # of the small model whose steps are held up by the host alone
STEPS, WARM_UP = 60, 10  # of the host: the first in a process are slow, and single ones are disturbed


def calibrate(device: torch.device, say: Callable[[str], object] = str) -> Measured:
    """Measures a GPU.

    Args:
        device: Of type "cuda".
        say: Told what is about to happen; by default nobody is.

    Raises:
        ModelError: without a GPU.
        MemoryBudgetError: if 2 GB of host memory cannot be registered.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ModelError(
            "torch finds no GPU here: there is nothing to measure.",
            "Run it where the GPU is; `hybridtrainer plan --hardware rtx-4070` plans for a card from its data sheet.",
        )
    say("copies between host memory and the GPU ...")
    link = measure_link(device)
    say("large products in 16 bits ...")
    flops = product_rate(device)
    say("plain kernels ...")
    memory = memory_rate(device)
    say("small steps ...")
    launch = launch_seconds(device)
    return as_measured(link, flops, memory, launch, torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device))


def as_measured(
    link: Link, flops: float, memory: float, launch: float, free_and_total: tuple[int, int], reserved: int
) -> Measured:
    """All in one record; what is in use on the card beyond what torch has reserved counts as CUDA's own."""
    free, total = free_and_total
    today = datetime.now(UTC).date().isoformat()
    own = max(1, total - free - reserved)
    return Measured(flops, memory, link.inward, link.outward, link.both, launch, own, total, today)


def product_rate(device: torch.device, side: int = SIDE, repeats: int = REPEATS) -> float:
    """Operations in a second of a large product; of random numbers, for those of zeros are multiplied faster."""
    dtype = torch.bfloat16 if device.type != "cuda" or torch.cuda.is_bf16_supported() else torch.float16
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return rate_of(lambda: torch.mm(left, right, out=out), 2 * side**3, repeats, device)


def memory_rate(device: torch.device, elements: int = ELEMENTS, repeats: int = REPEATS) -> float:
    """Bytes in a second that a sum of two tensors reads and writes."""
    left, right, out = (torch.ones(elements, dtype=torch.bfloat16, device=device) for _ in range(3))
    return rate_of(lambda: torch.add(left, right, out=out), 3 * left.nbytes, repeats, device)


def launch_seconds(device: torch.device, steps: int = STEPS) -> float:
    """Seconds of the host for each kernel, as a plan counts them, of a model so small that the GPU waits."""
    model = build_gpt("nano", context=CONTEXT, device=device)
    kernels = rehearse_resident(model, MemoryConfig(precision="bf16"), SAMPLES, CONTEXT).spent.kernels
    tokens = torch.zeros(SAMPLES, CONTEXT + 1, dtype=torch.long, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = language_loss(model, tokens).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)

    for _ in range(min(WARM_UP, steps)):
        step()
    taken = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        if device.type == "cuda":  # as a trainer waits, which reads the loss of every step
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) / kernels  # some are held up by what else the machine does


def describe(name: str, found: Measured) -> str:
    """What was measured, for people."""
    return "\n".join(
        [
            f"{name}, {found.vram_bytes / 2**30:.1f} GiB, {found.context_bytes / 2**30:.2f} of them taken by CUDA and "
            "others:",
            f"  products in 16 bits   {found.flops / 1e12:8.1f} TFLOP/s",
            f"  memory                {found.memory / 1e9:8.0f} GB/s",
            f"  link                  {found.inward / 1e9:8.1f} GB/s in, {found.outward / 1e9:.1f} out, "
            f"{found.both / 1e9:.1f} both ways at once",
            f"  host, for each kernel {found.launch * 1e6:8.1f} us",
        ]
    )
