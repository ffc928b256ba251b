"""What each memory option of a resident model saves and costs: `python -m benchmarks.resident_options [--device cuda]`

The same decoder is trained for some steps with each option alone and with all of them, jumps included. Said are the
most GPU memory that tensors took in real steps and in jumps, the median seconds of a real step, and the mean loss of
the last ten real steps. On a CPU there is no GPU memory to tell of.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import RESULTS, write_result
from hybridtrainer import HybridTrainer, HybridTrainerConfig, MemoryConfig
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.data.text import ByteTokenizer, TextSplits, load_text, stdlib_documents
from hybridtrainer.memory.low_bit import LowBitAdamW
from hybridtrainer.models.gpt import build_gpt, gpt_loss

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"precision": "bf16"},
    "adaptive": {"precision": "adaptive"},
    "checkpoint_every 1": {"checkpoint_every": 1},
    "keep products": {"checkpoint_every": 1, "checkpoint_keep": "products"},
    "offload": {"offload_activations": True},
    "checkpoint and offload": {"checkpoint_every": 1, "offload_activations": True},
    "8-bit moments": {"optimizer_bits": 8},
    "4-bit moments": {"optimizer_bits": 4},
    "int8 probes": {"predict_int8": True},
    "states leave": {"predict_states": "leave"},
    "all": {
        "precision": "bf16", "checkpoint_every": 1, "offload_activations": True, "optimizer_bits": 8,
        "predict_int8": True, "predict_states": "leave",
    },
}  # fmt: skip
EAGER: dict[str, Any] = {
    "predict": ["jumps"], "warmup_steps": 12, "full_steps": 6, "correct_steps": 3, "confidence_threshold": 0.0,
    "waste_limit": 1.0, "recovery_steps": 2, "max_failures": 1000, "history_windows": 4, "forecaster": "line_fit",
}  # fmt: skip


def run(memory: dict[str, Any], splits: TextSplits, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains once."""
    torch.manual_seed(0)
    device = arguments.device
    model = build_gpt(arguments.model, context=arguments.context).to(device)
    bits = memory.get("optimizer_bits", 32)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=arguments.lr)
        if bits == 32
        else LowBitAdamW(model.parameters(), lr=arguments.lr, bits=bits)
    )
    config = HybridTrainerConfig(**EAGER, memory=MemoryConfig.model_validate(memory))
    probes = list(islice(iter(PositionedLoader(splits.probe, arguments.batch, seed=0)), 2))

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return gpt_loss(model, batch.to(device))

    trainer = HybridTrainer(model, optimizer, loss_fn, config, clip_norm=1.0, probe_batches=probes)
    peaks: dict[str, int] = {}
    seconds: list[float] = []
    losses: list[float] = []
    for batch in islice(iter(PositionedLoader(splits.train, arguments.batch, seed=0)), arguments.steps):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        result = trainer.step(batch)
        if device == "cuda":
            torch.cuda.synchronize()
            kind = "jump" if result.predicted else "real step"
            peaks[kind] = max(peaks.get(kind, 0), torch.cuda.max_memory_allocated())
        if not result.predicted:
            seconds.append(time.perf_counter() - began)
            losses.append(result.loss)
    told = trainer.statistics()
    return {
        "peak_bytes": peaks, "real_step_seconds": median(seconds), "loss": fmean(losses[-10:]),
        "jumps_accepted": told.jumps_accepted, "jumps_refused": told.jumps_refused,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    splits = load_text(stdlib_documents(), ByteTokenizer(), arguments.context, 0.02, 0.01, "the standard library")
    rows: dict[str, Any] = {}
    print(f"{'option':24}{'real step GiB':>15}{'jump GiB':>10}{'ms':>9}{'loss':>9}  jumps accepted, refused")
    for name in arguments.options:
        row = rows[name] = run(OPTIONS[name], splits, arguments)
        real, jump = (row["peak_bytes"].get(kind, 0) / 2**30 for kind in ("real step", "jump"))
        jumps = f"{row['jumps_accepted']}, {row['jumps_refused']}"
        print(
            f"{name:24}{real:15.3f}{jump:10.3f}{1000 * row['real_step_seconds']:9.1f}{row['loss']:9.4f}  {jumps}",
            flush=True,
        )
    content = {"model": arguments.model, "batch": arguments.batch, "context": arguments.context, "rows": rows}
    print(f"written to {write_result(f'resident_options_{arguments.device}', content, arguments.out)}")


if __name__ == "__main__":
    main()
