"""What the memory profiler costs: a loop of `trainer.step` with it and without it, in turns on the same batches.

The result is the processor time spent inside the profiler, timed directly, as a share of a step's; on a machine that
others use, the ratio of the two loops is noise around it. On a GPU the step is waited for before the clock is read, and
the share is of its wall-clock time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead import CLIP, build, parser_for_a_gpt
from benchmarks.record import RESULTS, write_result
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.data.loader import PositionedLoader
from hybridtrainer.data.text import ByteTokenizer, load_text, stdlib_documents
from hybridtrainer.models.gpt import gpt_loss
from hybridtrainer.observe.profiler import MemoryProfiler
from hybridtrainer.observe.snapshots import SnapshotFile
from hybridtrainer.trainer import HybridTrainer

BLOCK = 10


class TimedProfiler(MemoryProfiler):
    """Knows how long it has taken."""

    inside = 0.0

    def record_step(self, phase: str = "train", step: int | None = None) -> None:
        """Timed."""
        began = time.thread_time()
        super().record_step(phase, step)
        self.inside += time.thread_time() - began

    def _before_update(self, *arguments: Any) -> None:
        began = time.thread_time()
        super()._before_update(*arguments)
        self.inside += time.thread_time() - began


def make(arguments: argparse.Namespace) -> HybridTrainer:
    model, optimizer = build(arguments)
    settings = {"predict": "off", "memory": {"precision": "bf16" if arguments.bf16 else "fp32"}}
    return HybridTrainer(model, optimizer, gpt_loss, HybridTrainerConfig.model_validate(settings), clip_norm=CLIP)


def main() -> None:
    parser = parser_for_a_gpt(__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="blocks of 10 steps of each arm")
    parser.add_argument("--name", default="profiler_overhead", help="name of the result file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()

    splits = load_text(stdlib_documents(), ByteTokenizer(), arguments.context, 0.05, 0.02, "stdlib")
    loader = PositionedLoader(splits.train, arguments.batch)
    batches = (batch.to(arguments.device) for _ in itertools.count() for batch in loader)
    clock = time.perf_counter if arguments.device == "cuda" else time.process_time
    arms = {"without": make(arguments), "profiled": make(arguments)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as folder:
        file = SnapshotFile(Path(folder) / "profile.csv")
        profiler = TimedProfiler(arms["profiled"].model, arms["profiled"].optimizer, keep=False, follow=file.append)
        profiler.start()
        arms["profiled"].listeners.append(profiler.record)
        for number in range(arguments.rounds * BLOCK):
            batch = next(batches)
            for name in list(arms) if number % 2 else list(reversed(arms)):
                began = clock()
                arms[name].step(batch)
                if arguments.device == "cuda":
                    torch.cuda.synchronize()
                seconds[name].append(clock() - began)
        profiler.stop()
        file.close()
    taken = {name: statistics.median(values) for name, values in seconds.items()}
    inside = profiler.inside / len(seconds["profiled"])
    row = {
        "ms_per_step": 1000 * taken["without"],
        "profiled_ms_per_step": 1000 * taken["profiled"],
        "inside_ms_per_step": 1000 * inside,
        "share": inside / taken["without"],
    }
    known = {"device": arguments.device, "steps": len(seconds["profiled"])}
    path = write_result(arguments.name, known | row, arguments.out)
    print(f"step {row['ms_per_step']:.2f} ms, profiled {row['profiled_ms_per_step']:.2f} ms")
    print(f"inside the profiler {row['inside_ms_per_step']:.4f} ms a step, {row['share']:.3%}")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
