"""Speed and memory of streamed training: tokens per second, peaks, and the same computation without copies.

The model is one of ours by name, with random weights and random tokens: neither changes the speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from hybridtrainer.bench.calibrate import launch_seconds
from hybridtrainer.bench.link import measure_link
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.memory.engine import Engine
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.residency import DECIDED_STEPS
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import GPT, build_gpt
from hybridtrainer.models.language import language_loss
from hybridtrainer.observe.own_host import own_host_bytes
from hybridtrainer.sizes import as_count, as_seconds, as_size

DECIDING_STEPS = DECIDED_STEPS + 1  # until the engine has decided what stays on the device, and has done it
WARMUP_STEPS = 3


@dataclass(frozen=True)
class StreamCase:
    """What to measure.

    Attributes:
        model: A decoder by name.
        tokens: In one step, over all sequences.
        context: Tokens in one sequence.
        blocks: How many of the model's blocks; None for all.
        steps: Timed steps; others come first, in which the engine decides what stays on the device.
        without_copies: Whether to time the same computation without copies too.
    """

    model: str
    memory: MemoryConfig
    tokens: int = 16384
    context: int = 2048
    blocks: int | None = None
    steps: int = 4
    clip_norm: float | None = None
    tile_tokens: int = 1024
    without_copies: bool = True


def measure_stream(case: StreamCase, device: str = "cuda", say: Callable[[str], None] = print) -> dict[str, Any]:
    """Trains a few steps under the case's memory limit and returns what it took."""
    if case.tokens % case.context:
        raise ModelError(f"{case.tokens} tokens are no whole sequences of {case.context}.", "Choose a multiple.")
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    is_gpu = place.type == "cuda"
    link, launches = (measure_link(place), [_launch_seconds(place)]) if is_gpu else (None, [])
    started = time.perf_counter()
    model = _build(case, place)
    optimizer = model.optimizer
    assert isinstance(optimizer, StreamedOptimizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ready_seconds = time.perf_counter() - started
    say(f"{case.model}: {as_count(parameters)} parameters in host memory after {ready_seconds:.0f} s")
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(place)
    losses: list[float] = []
    seconds = _time_steps(model, optimizer, case, place, losses, DECIDING_STEPS)
    result: dict[str, Any] = {
        "case": {**asdict(case), "memory": case.memory.model_dump()},
        "parameters": parameters,
        "ready_seconds": ready_seconds,
        "losses": losses,
        "seconds_per_step": seconds,
        "tokens_per_second": case.tokens / seconds,
        "model_tflops": 6 * parameters * case.tokens / seconds / 1e12,
        "split": optimizer.engine.chunks.split,
        "kept_weights": len(optimizer.engine.rings.weights.pinned),
        "packed": optimizer.engine.rings.weights.is_packed,
        "kept_states": _blocks_of_states_kept(optimizer.engine),
        "host_bytes": own_host_bytes(),
        "host_bytes_per_parameter": optimizer.host_bytes / parameters,
    }
    if is_gpu and link is not None:
        result |= {
            "link": asdict(link),
            "allocated_peak_bytes": torch.cuda.max_memory_allocated(place),
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(place),
            "context_bytes": _context_bytes(place),
        }
        torch.cuda.set_per_process_memory_fraction(1.0, place)
        launches.append(_launch_seconds(place))  # the host's speed changes
        result |= {"launch_seconds": min(launches), "launch_readings": launches}
    if case.without_copies:
        optimizer.engine.stop_copies()
        alone: list[float] = []
        result["seconds_without_copies"] = _time_steps(model, optimizer, case, place, alone, WARMUP_STEPS)
        # Updates of what is not finite are left out, and GPUs multiply such numbers faster.
        assert all(math.isfinite(loss) for loss in alone), alone
        result["share_of_compute"] = result["seconds_without_copies"] / seconds
    optimizer.close()
    return result


def describe(found: dict[str, Any]) -> str:
    """What `measure_stream` found, for people."""
    gib = 2**30
    lines = [
        f"{found['tokens_per_second']:,.0f} tokens/s, {as_seconds(found['seconds_per_step'])} a step, "
        f"{_tflops(found['model_tflops'])} model TFLOP/s",
        f"host memory {as_size(found['host_bytes'], digits=1)}, "
        f"{found['host_bytes_per_parameter']:.2f} bytes per parameter",
        f"{_parts(found['split'])}; weights of {found['kept_weights']} blocks stay on the device, states of "
        f"{found['kept_states']:g}" + ("; the others travel packed" if found["packed"] else ""),
    ]
    if "share_of_compute" in found:
        lines.append(f"{found['share_of_compute']:.1%} of the speed of the same computation without copies")
    if "link" in found:
        link = {name: rate / 1e9 for name, rate in found["link"].items()}
        lines += [
            f"GPU memory: reserved peak {found['reserved_peak_bytes'] / gib:.2f} GiB, allocated "
            f"{found['allocated_peak_bytes'] / gib:.2f}; CUDA itself takes {found['context_bytes'] / gib:.2f} GiB more",
            f"link: {link['inward']:.1f} GB/s in, {link['outward']:.1f} out, {link['both']:.1f} both ways at once",
        ]
    return "\n".join(lines)


def _tflops(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _parts(split: int) -> str:
    return f"batches computed in {split} parts" if split > 1 else "batches computed whole"


def _blocks_of_states_kept(engine: Engine) -> float:
    """States that stay on the device, in blocks."""
    kept = sum(slot.buffer.nbytes for key, slot in engine.rings.states.pinned.items() if key[0] < len(engine.blocks))
    return round(kept / max(1, engine.blocks[0].layout.state_bytes), 1)


def _build(case: StreamCase, device: torch.device) -> GPT:
    model = build_gpt(case.model, context=case.context, blocks=case.blocks, device="meta")
    streamed = stream(model, case.memory, device, lr=1e-6, weight_decay=0.1, clip_norm=case.clip_norm)
    assert isinstance(streamed, GPT)
    streamed.initialize_(device)
    return streamed


def _time_steps(
    model: GPT, optimizer: StreamedOptimizer, case: StreamCase, device: torch.device, losses: list[float], before: int
) -> float:
    """Seconds of a step, the median of the timed ones; so many come before.

    Steps of a small model wait for the host, which others hold up now and then. Each step has new tokens: matrices
    full of zeros, as the gradients of what is known by heart, are multiplied faster.
    """
    shape = (case.tokens // case.context, case.context + 1)
    ended = []
    for _ in range(before + case.steps):
        tokens = torch.randint(0, model.config.vocabulary, shape, device=device)
        loss = language_loss(model, tokens, tile_tokens=case.tile_tokens).mean()
        optimizer.updates.watch_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))  # waits for the update, and not for what goes home
        ended.append(time.perf_counter())
    _wait(device)
    return median(after - earlier for earlier, after in pairwise(ended[-case.steps - 1 :]))


def _launch_seconds(device: torch.device) -> float:
    found = launch_seconds(device)
    torch.cuda.empty_cache()  # what is measured next shall find the card as it was
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _context_bytes(device: torch.device) -> int:
    """What CUDA itself takes: in use on the card beyond what torch has reserved."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
