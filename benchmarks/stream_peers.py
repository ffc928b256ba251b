"""The streaming engine beside what people use otherwise: the model resident, FSDP2 and ZeRO-3 with CPU offload.

The same blocks, tokens, tiled loss and recomputation for all; each in a process of its own. `--blocks 16` of the 7B is
what a resident AdamW still holds comfortably.

python -m benchmarks.stream_peers --tokens 16384 4096

ZeRO-3 needs DeepSpeed and a compiler for its Adam; where they are missing the others are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import GPT, build_gpt
from hybridtrainer.models.language import language_loss
from hybridtrainer.observe.own_host import own_host_bytes

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
WARMUP = 3  # the streaming engine watches two steps before it decides what stays on the device


Step = Callable[[Tensor], object]


def streamed(arguments: argparse.Namespace, device: torch.device) -> Step:
    """Weights and 8-bit moments in host memory; clipped by the last norm, inside."""
    model = build_gpt(arguments.model, blocks=arguments.blocks, context=arguments.context, device="meta")
    memory = MemoryConfig(mode="split8", split=arguments.split, vram=arguments.vram)
    found = stream(model, memory, device, lr=1e-6, clip_norm=1.0)
    assert isinstance(found, GPT)
    found.initialize_(device)
    return _loop(found, found.optimizer, _tiled_loss)


def resident(arguments: argparse.Namespace, device: torch.device) -> Step:
    """bf16 weights and moments on the device, torch's fused AdamW, every block recomputed."""
    model = _recomputing(build_gpt(arguments.model, blocks=arguments.blocks, context=arguments.context, device="meta"))
    model = model.to_empty(device=device).to(torch.bfloat16)
    model.initialize_(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    return _loop(model, optimizer, _tiled_loss, clip_norm=1.0)


def fsdp2_offload(arguments: argparse.Namespace, device: torch.device) -> Step:
    """fp32 weights and moments on the CPU, bf16 in each block while it is computed; the CPU makes the update."""
    from torch.distributed import init_process_group
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ |= ALONE
    init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    model = _drawn(arguments, device)
    options: dict[str, Any] = {
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _loop(model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True), _whole_loss)


def zero3_offload(arguments: argparse.Namespace, device: torch.device) -> Step:
    """DeepSpeed's ZeRO-3, weights and moments on the CPU, its own Adam there."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    os.environ |= ALONE | {"LOCAL_RANK": "0"}
    deepspeed.init_distributed("nccl")
    model = _WithLoss(_drawn(arguments, device))
    away = {"device": "cpu", "pin_memory": True}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-6),
        config={
            "train_micro_batch_size_per_gpu": arguments.tokens[0] // arguments.context,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {
                "stage": 3,
                "offload_param": away,
                "offload_optimizer": away,
                "overlap_comm": True,
                "contiguous_gradients": True,
            },
        },
    )

    def step(tokens: Tensor) -> None:
        engine.backward(engine(tokens))
        engine.step()

    return step


WAYS: dict[str, Callable[[argparse.Namespace, torch.device], Step]] = {
    "streamed": streamed,
    "resident": resident,
    "fsdp2-offload": fsdp2_offload,
    "zero3-offload": zero3_offload,
}


def _loop(model: GPT, optimizer: Any, loss_of: Callable[[GPT, Tensor], Tensor], clip_norm: float | None = None) -> Step:
    def step(tokens: Tensor) -> None:
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _WithLoss(nn.Module):
    """A model whose forward is its loss, for those who gather parameters in it."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return _whole_loss(self.model, tokens)


def _drawn(arguments: argparse.Namespace, device: torch.device) -> GPT:
    """On the CPU, its weights drawn on the device: a CPU takes minutes."""
    model = _recomputing(build_gpt(arguments.model, blocks=arguments.blocks, context=arguments.context, device="meta"))
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, device=device) * 0.02)
    return model


def _recomputing(model: GPT) -> GPT:
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    return model


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step and the reserved peak of one way."""
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    vocabulary = build_gpt(arguments.model, blocks=1, context=arguments.context, device="meta").config.vocabulary
    step = WAYS[arguments.one](arguments, device)
    shape = (arguments.tokens[0] // arguments.context, arguments.context + 1)
    started = 0.0
    for number in range(WARMUP + arguments.steps):
        if number == WARMUP:
            _wait(device)
            started = time.perf_counter()
        step(torch.randint(0, vocabulary, shape, device=device))
    _wait(device)
    seconds = (time.perf_counter() - started) / arguments.steps
    return {
        "seconds_per_step": seconds,
        "tokens_per_second": arguments.tokens[0] / seconds,
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0,
        "host_bytes": own_host_bytes(),
    }


def _tiled_loss(model: GPT, tokens: Tensor) -> Tensor:
    return language_loss(model, tokens).mean()


def _whole_loss(model: GPT, tokens: Tensor) -> Tensor:
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
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--one", choices=list(WAYS), help="measure one way in this process and print its JSON")
    parser.add_argument("--name", default="stream_peers")
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
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                print(f"{way} with {tokens} tokens failed: {done.stderr[-1500:]}", flush=True)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            rows[f"{way}, {tokens}"] = found
            print(
                f"{way:14} {tokens:6} tokens{found['tokens_per_second']:9.0f} tok/s  {found['seconds_per_step']:.3f} s "
                f"reserved {found['reserved_peak_bytes'] / 2**30:.2f} GiB, "
                f"host {found['host_bytes'] / 1e9:.1f} GB",
                flush=True,
            )
            write_result(arguments.name, {"rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
