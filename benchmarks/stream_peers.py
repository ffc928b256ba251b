"""The streaming engine beside what people use otherwise: the model resident, and FSDP2 with CPU offload.

The same blocks, tokens, tiled loss and recomputation for all; each in a process of its own. `--blocks 16` of the 7B is
what a resident AdamW still holds comfortably.

python -m benchmarks.stream_peers --tokens 16384 4096
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import GPT, build_gpt
from hybridtrainer.models.language import language_loss

WAYS = ("streamed", "resident", "fsdp2-offload")
WARMUP = 3  # the streaming engine watches two steps before it decides what stays on the device


def streamed(arguments: argparse.Namespace, device: torch.device) -> tuple[GPT, Any]:
    model = build_gpt(arguments.model, blocks=arguments.blocks, context=arguments.context, device="meta")
    memory = MemoryConfig(mode="split8", split=arguments.split, vram=arguments.vram)
    found = stream(model, memory, device, lr=1e-6, clip_norm=1.0)
    assert isinstance(found, GPT)
    found.initialize_(device)
    return found, found.optimizer


def resident(arguments: argparse.Namespace, device: torch.device) -> tuple[GPT, Any]:
    """bf16 weights and moments on the device, torch's fused AdamW, every block recomputed."""
    model = _recomputing(build_gpt(arguments.model, blocks=arguments.blocks, context=arguments.context, device="meta"))
    model = model.to_empty(device=device).to(torch.bfloat16)
    model.initialize_(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")


def fsdp2_offload(arguments: argparse.Namespace, device: torch.device) -> tuple[GPT, Any]:
    """fp32 weights and moments on the CPU, bf16 in each block while it is computed; the CPU makes the update."""
    from torch.distributed import init_process_group
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    model = _recomputing(build_gpt(arguments.model, blocks=arguments.blocks, context=arguments.context, device="meta"))
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():  # drawn on the device: a CPU takes minutes
            parameter.copy_(torch.randn(parameter.shape, device=device) * 0.02)
    options: dict[str, Any] = {
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)


def _recomputing(model: GPT) -> GPT:
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    return model


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step and the reserved peak of one way."""
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    make = {"streamed": streamed, "resident": resident, "fsdp2-offload": fsdp2_offload}[arguments.one]
    model, optimizer = make(arguments, device)
    loss_of = _whole_loss if arguments.one == "fsdp2-offload" else _tiled_loss
    shape = (arguments.tokens[0] // arguments.context, arguments.context + 1)
    started = 0.0
    for step in range(WARMUP + arguments.steps):
        if step == WARMUP:
            _wait(device)
            started = time.perf_counter()
        tokens = torch.randint(0, model.config.vocabulary, shape, device=device)
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        if not isinstance(optimizer, torch.optim.AdamW):
            pass  # clipped by the last norm, inside
        elif arguments.one == "resident":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    _wait(device)
    seconds = (time.perf_counter() - started) / arguments.steps
    peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return {
        "seconds_per_step": seconds,
        "tokens_per_second": arguments.tokens[0] / seconds,
        "reserved_peak_bytes": peak,
    }


def _tiled_loss(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    return language_loss(model, tokens).mean()


def _whole_loss(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """FSDP gathers the root's parameters in its forward, so the head must run inside the model."""
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-7b")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 4096])
    parser.add_argument("--split", type=int, default=2)
    parser.add_argument("--vram", default="16GB", help="of the streamed model; the others take what they need")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--one", choices=WAYS, help="measure one way in this process and print its JSON")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    rows: dict[str, Any] = {}
    for tokens in arguments.tokens:
        for way in arguments.ways:
            given = [
                f"--{key}={getattr(arguments, key)}"
                for key in ("model", "blocks", "context", "split", "vram", "steps", "device")
            ]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.stream_peers", "--one", way, "--tokens", str(tokens), *given],
                stdout=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                print(f"{way} with {tokens} tokens failed", flush=True)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            rows[f"{way}, {tokens}"] = found
            print(
                f"{way:14} {tokens:6} tokens{found['tokens_per_second']:9.0f} tok/s  {found['seconds_per_step']:.3f} s "
                f"reserved {found['reserved_peak_bytes'] / 2**30:.2f} GiB",
                flush=True,
            )
            write_result("stream_peers", {"rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
