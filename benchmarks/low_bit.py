"""Do streamed low-bit updates train as well as fp32 AdamW? The same GPT on real text, several seeds, every mode.

All modes of a seed have the same weights at the start and the same batches. What is compared is the validation loss
at the end, of each mode at the best of the learning rates that were tried; its spread over the seeds of fp32 says what
noise is.

python -m benchmarks.low_bit --device cuda --workers 12
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.data.text import ByteTokenizer, load_text, stdlib_documents
from hybridtrainer.memory.stream import stream
from hybridtrainer.models.gpt import GPT, GPTConfig
from hybridtrainer.models.language import language_loss

MODES = ("fp32", "split8", "sr8", "sr4", "factored")
SHAPE = GPTConfig("llama", 6, 256, 8, vocabulary=256, context=256, tied=False)
BATCH, WARMUP = 16, 50
RATES = (1e-3, 2e-3, 4e-3)


def train(mode: Any, rate: float, seed: int, steps: int, device: str) -> list[float]:
    """Validation losses at each fifth of the run."""
    torch.set_num_threads(1)
    splits = load_text(stdlib_documents(), ByteTokenizer(), SHAPE.context, 0.02, 0.01, "the standard library")
    torch.manual_seed(seed)
    model = stream(GPT(SHAPE), MemoryConfig(mode=mode), device, lr=rate, weight_decay=0.1, clip_norm=1.0, seed=seed)
    optimizer: Any = model.optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1.0) * (1.0 - 0.9 * step / steps)
    )
    held_out = list(islice(iter(PositionedLoader(splits.validation, 32, seed=0)), 8))
    losses = []
    for step, batch in enumerate(islice(iter(PositionedLoader(splits.train, BATCH, seed=seed)), steps), start=1):
        loss = language_loss(model, batch.to(device)).mean()
        optimizer.updates.watch_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % max(1, steps // 5) == 0:
            with torch.no_grad():
                losses.append(fmean(float(language_loss(model, each.to(device)).mean()) for each in held_out))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    keys = [(mode, rate, seed) for seed in seeds for mode in arguments.modes for rate in arguments.rates]
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        futures = {key: pool.submit(train, *key, arguments.steps, arguments.device) for key in keys}
        found = {key: future.result() for key, future in futures.items()}

    def finals(mode: str, rate: float) -> list[float]:
        return [found[mode, rate, seed][-1] for seed in seeds]

    rows: dict[str, Any] = {}
    best = {mode: min(arguments.rates, key=lambda rate: fmean(finals(mode, rate))) for mode in arguments.modes}
    base = finals("fp32", best["fp32"])
    print(
        f"{'mode':10}{'best rate':>10}{'final loss':>12}{'spread':>9}{'against fp32':>14}   per seed; mean at each rate"
    )
    for mode, rate in best.items():
        losses = finals(mode, rate)
        differences = [ours - theirs for ours, theirs in zip(losses, base, strict=True)]
        at_rates = {each: fmean(finals(mode, each)) for each in arguments.rates}
        curves = {f"{each:g}": [found[mode, each, seed] for seed in seeds] for each in arguments.rates}
        rows[mode] = {"best_rate": rate, "differences": differences, "curves": curves}
        spread = stdev(losses) if len(losses) > 1 else 0.0
        shown = " ".join(f"{difference:+.4f}" for difference in differences)
        others = ", ".join(f"{each:g}: {loss:.4f}" for each, loss in at_rates.items())
        print(f"{mode:10}{rate:10g}{fmean(losses):12.4f}{spread:9.4f}{fmean(differences):+14.4f}   {shown}; {others}")
    content = {"steps": arguments.steps, "seeds": arguments.seeds, "shape": vars(SHAPE), "modes": rows}
    print(f"written to {write_result('low_bit', content, arguments.out)}")


if __name__ == "__main__":
    main()
