"""What the trainer costs on several ranks: a plain DDP loop beside prediction off and Full-phase bookkeeping, in turns.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.ranks

Copies of one GPT are trained side by side on the same batches, each of them on all ranks. In one arm the trainer
averages gradients when every rank has its own, in another DDP does so while they are computed. The median over blocks
of the ratio to the plain loop is the result; the first rank's clock counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import RESULTS, write_result
from hybridtrainer import ranks
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.data.text import ByteTokenizer, load_text, stdlib_documents
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss
from hybridtrainer.trainer import HybridTrainer

BLOCK, CLIP = 20, 1.0
Step = Callable[[Tensor], Any]


def build(arguments: argparse.Namespace) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    shape = GPTConfig("gpt2", arguments.blocks, arguments.width, arguments.width // 64, 256, arguments.context)
    model = DistributedDataParallel(GPT(shape))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def plain(arguments: argparse.Namespace) -> Step:
    model, optimizer = build(arguments)

    def step(batch: Tensor) -> float:
        loss = gpt_loss(model, batch).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def hybrid(arguments: argparse.Namespace, **settings: Any) -> Step:
    model, optimizer = build(arguments)
    return HybridTrainer(model, optimizer, gpt_loss, HybridTrainerConfig.model_validate(settings), clip_norm=CLIP).step


def measure(arms: dict[str, Step], batches: PositionedLoader, blocks: int) -> dict[str, list[float]]:
    """Seconds of each block for each arm; within a block the arms take turns at every step."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    stream = (batch for _ in itertools.count() for batch in batches)
    for block in range(blocks + 1):
        total = dict.fromkeys(arms, 0.0)
        for index in range(BLOCK):
            batch = next(stream)
            for name in list(arms) if index % 2 else list(reversed(arms)):
                dist.barrier()
                began = time.perf_counter()
                arms[name](batch)
                total[name] += time.perf_counter() - began
        if block:  # the first one warms up
            for name, value in total.items():
                seconds[name].append(value)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="blocks of steps to measure")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="of all ranks together")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    text = load_text(stdlib_documents()[:200], ByteTokenizer(), arguments.context, 0.05, 0.05, "the standard library")
    never: dict[str, Any] = {"predict": ["jumps"], "warmup_steps": 0, "full_steps": BLOCK, "confidence_threshold": 1.0}
    arms = {
        "plain DDP": plain(arguments),
        "off": hybrid(arguments, predict="off"),
        "off, DDP averages": hybrid(arguments, predict="off", memory={"retry_smaller": False}),
        "full": hybrid(arguments, **never),
    }
    share = (ranks.rank(), ranks.count())
    seconds = measure(arms, PositionedLoader(text.train, arguments.batch, share=share), arguments.rounds)
    if ranks.is_first():
        base = seconds["plain DDP"]
        content = {
            "command": f"torchrun --standalone --nproc-per-node {ranks.count()} -m benchmarks.ranks",
            "ranks": ranks.count(),
            "load_average": os.getloadavg()[0],
            "milliseconds_per_step": {name: 1000 * statistics.median(found) / BLOCK for name, found in seconds.items()},
            "ratio_to_plain_ddp": {
                name: statistics.median(mine / other for mine, other in zip(found, base, strict=True))
                for name, found in seconds.items()
            },
            "blocks": seconds,
        }
        print(write_result("ranks", content, arguments.out), content["ratio_to_plain_ddp"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
