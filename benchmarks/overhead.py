"""What the trainer costs: a plain loop, prediction off, and Full-phase bookkeeping, step by step in turns.

Copies of one GPT are trained side by side on the same batches: without bookkeeping, with that of jumps, and with a
dynamics model besides. A block is as many steps of each as a Full phase has, so that the closing of a window is in
every block. The median over blocks of the ratio to the plain loop is the result. Blocks are left out of it until all
windows have their host memory, which a run asks for once; `first_ratio` is the mean of those.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.data.text import ByteTokenizer, load_text, stdlib_documents
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss
from hybridtrainer.trainer import HybridTrainer

BLOCK = 20
FIRST = 9  # windows that are kept, and the one that is being written
FULL = {"warmup_steps": 0, "confidence_threshold": 1.0, "full_steps": BLOCK}
ARMS: dict[str, dict[str, Any]] = {
    "prediction off": {"predict": "off"},
    "Full bookkeeping": FULL,
    "with blend": FULL | {"dynamics": "blend"},
    "with rssm": FULL | {"dynamics": "rssm"},
}
CLIP = 1.0
Step = Callable[[Tensor], float]


def build(arguments: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    shape = GPTConfig("gpt2", arguments.blocks, arguments.width, arguments.width // 64, 256, arguments.context)
    model = GPT(shape).to(arguments.device)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=arguments.device == "cuda" or None)


def plain(arguments: argparse.Namespace) -> Step:
    model, optimizer = build(arguments)

    def step(batch: Tensor) -> float:
        with torch.autocast(arguments.device, torch.bfloat16, enabled=arguments.bf16):
            loss = gpt_loss(model, batch)
        loss = loss.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def hybrid(arguments: argparse.Namespace, **settings: Any) -> Step:
    model, optimizer = build(arguments)
    settings["memory"] = {"precision": "bf16" if arguments.bf16 else "fp32"}
    trainer = HybridTrainer(model, optimizer, gpt_loss, HybridTrainerConfig.model_validate(settings), clip_norm=CLIP)
    return lambda batch: trainer.step(batch).loss


def measure(arms: dict[str, Step], batches: PositionedLoader, blocks: int, device: str) -> dict[str, list[float]]:
    """Seconds of each block for each arm, the first one left out; within a block the arms take turns at every step."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    stream = (batch.to(device) for _ in itertools.count() for batch in batches)
    for block in range(blocks + 1):
        total = dict.fromkeys(arms, 0.0)
        for index in range(BLOCK):
            batch = next(stream)
            order = list(arms) if index % 2 else list(reversed(arms))
            losses = set()
            for name in order:
                if device == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                losses.add(arms[name](batch))
                if device == "cuda":
                    torch.cuda.synchronize()
                total[name] += time.perf_counter() - began
            assert len(losses) == 1 or device == "cuda", "the arms must compute the same"
        if block:  # the first one warms up
            for name, value in total.items():
                seconds[name].append(value)
    return seconds


def parser_for_a_gpt(text: str | None) -> argparse.ArgumentParser:
    """With the options that `build` reads, and the size of a batch."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--bf16", action="store_true", help="autocast to bf16")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    return parser


def main() -> None:
    parser = parser_for_a_gpt(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="blocks of 20 steps of each arm")
    parser.add_argument(
        "--first", type=int, default=FIRST, help="blocks before them, in which windows get their memory"
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), help="beside the plain loop")
    parser.add_argument("--name", default="overhead", help="name of the result file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()

    splits = load_text(stdlib_documents(), ByteTokenizer(), arguments.context, 0.05, 0.02, "stdlib")
    arms = {"plain loop": plain(arguments)} | {name: hybrid(arguments, **ARMS[name]) for name in arguments.arms}
    parameters = sum(parameter.numel() for parameter in build(arguments)[0].parameters())
    count = arguments.first + arguments.rounds
    seconds = measure(arms, PositionedLoader(splits.train, arguments.batch), count, arguments.device)
    rows: dict[str, dict[str, Any]] = {}
    for name, all_values in seconds.items():
        all_ratios = [value / reference for value, reference in zip(all_values, seconds["plain loop"], strict=True)]
        first, ratios, values = (
            all_ratios[: arguments.first],
            all_ratios[arguments.first :],
            all_values[arguments.first :],
        )
        spread = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        rows[name] = {
            "ms_per_step": 1000 * statistics.median(values) / BLOCK,
            "ratio": statistics.median(ratios),
            "quartiles": [spread[0], spread[2]],
            "first_ratio": statistics.fmean(first) if first else None,
        }
    path = write_result(
        arguments.name,
        {"parameters": parameters, "tokens_per_step": arguments.batch * arguments.context, "rows": rows},
        arguments.out,
    )
    print(
        f"GPT of {parameters / 1e6:.1f}M parameters, {arguments.batch} x {arguments.context} tokens, {arguments.device}"
    )
    for name, row in rows.items():
        quartiles = " to ".join(f"{value:.4f}" for value in row["quartiles"])
        first_ratio = f"   at first x {row['first_ratio']:.4f}" if row["first_ratio"] else ""
        print(f"{name:18} {row['ms_per_step']:8.1f} ms/step   x {row['ratio']:.4f}   ({quartiles}){first_ratio}")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
