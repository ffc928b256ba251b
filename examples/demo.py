"""Trains a small GPT on Python's own source, plain and hybrid, from the same seed, and says what came out.

make demo          about three minutes on two cores
python examples/demo.py --steps 300
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridtrainer.config import RunConfig
from hybridtrainer.config_io import parse_config
from hybridtrainer.fit import FitResult
from hybridtrainer.observe.progress import make_progress
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.observe.tally import Statistics
from hybridtrainer.tasks import build_task

SAME_QUALITY = 0.01  # of the loss: what one seed cannot tell apart


def settings(steps: int, seed: int, **more: Any) -> RunConfig:
    """The built-in GPT at a constant learning rate."""
    return parse_config(
        {
            "preset": "conservative",
            "seed": seed,
            "model": {"name": "nano"},
            "optimizer": {"name": "adamw", "lr": 2e-3},
            "schedule": {"name": "constant", "warmup_steps": 50},
            "data": {"probe_batches": 1},
            "train": {"steps": steps, "batch_size": 16, "eval_interval": max(50, steps // 4), "eval_batches": 16},
            **more,
        }
    )


def train(name: str, config: RunConfig, folder: Path) -> tuple[FitResult, Statistics]:
    """Trains one arm with live progress."""
    task = build_task(config)
    result = task.fit(folder / name, make_progress(name=f"{name:6}"))
    return result, task.trainer.statistics()


def show(console: Console, results: dict[str, tuple[FitResult, Statistics]]) -> None:
    """Losses, steps and seconds of both arms."""
    table = Table("", *results, title="The same GPT, data and seed", title_justify="left")
    rows: dict[str, list[str]] = {
        "validation loss": [f"{result.evaluations[-1]['loss']:.4f}" for result, _ in results.values()],
        "steps on the clock": [str(statistics.steps) for _, statistics in results.values()],
        "  real (backward pass computed)": [str(statistics.real_steps) for _, statistics in results.values()],
        "  foreseen": [str(statistics.foreseen_steps) for _, statistics in results.values()],
        "training time": [f"{result.training_seconds:.1f} s" for result, _ in results.values()],
    }
    for phase in ("warmup", "full", "predict", "correct"):
        rows[f"  {phase}"] = [f"{statistics.seconds_by_phase[phase]:.1f} s" for _, statistics in results.values()]
    for label, cells in rows.items():
        table.add_row(label, *cells)
    console.print(table)


def explain_jumps(console: Console, folder: Path, statistics: Statistics) -> None:
    """Every jump that was tried, with its fate; and why there were not more."""
    console.print(
        f"\nJumps: {statistics.jumps_accepted} accepted by their probe ({statistics.jumps_kept} kept, "
        f"{statistics.jumps_rolled_back} rolled back), {statistics.jumps_refused} refused."
    )
    records = [record for record in read_log(folder / "hybrid" / "log.jsonl") if record["kind"] == "jump"]
    shown = [record for record in records if record["verdict"] != "kept"]
    for record in shown[:12]:
        console.print(f"  step {record['step']:4}  {record['verdict']:11}  {record['reason']}", highlight=False)
    if len(shown) > 12:
        console.print(f"  ... and {len(shown) - 12} more in {folder / 'hybrid' / 'log.jsonl'}", highlight=False)
    for reason, count in sorted(statistics.declined.items(), key=lambda item: -item[1]):
        console.print(f"  not tried {count} times: {reason}", highlight=False)


def verdict(results: dict[str, tuple[FitResult, Statistics]]) -> str:
    """What one pair of runs can say."""
    (plain, _), (hybrid, statistics) = results["plain"], results["hybrid"]
    # Against its own real steps: the machine may have been busier during one of the two runs.
    ratio = statistics.estimated_speedup or 1.0
    losses = plain.evaluations[-1]["loss"], hybrid.evaluations[-1]["loss"]
    difference = losses[1] / losses[0] - 1
    quality = "a lower loss" if difference < 0 else "a HIGHER loss"
    if abs(difference) <= SAME_QUALITY:
        quality = "the same loss"
    share = (
        f"{1 - 1 / ratio:.0%} less time than as many real steps of the same run"
        if ratio >= 1
        else f"{1 / ratio - 1:.0%} MORE time than as many real steps of the same run"
    )
    real = f"Hybrid made {statistics.real_steps} of {statistics.steps} steps for real."
    return (
        f"{real} It took {share}, probes and roll-backs included, and reached {quality} ({difference:+.1%}).\n"
        "One seed, an untuned rate, a constant schedule: this shows how it works, and proves nothing about speed."
    )


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}")
    arguments = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 110)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results = {
        "plain": train("plain", settings(arguments.steps, arguments.seed, predict="off"), arguments.folder),
        "hybrid": train("hybrid", settings(arguments.steps, arguments.seed), arguments.folder),
    }
    show(console, results)
    explain_jumps(console, arguments.folder, results["hybrid"][1])
    console.print(f"\n{verdict(results)}", highlight=False)
    console.print(f"Logs and checkpoints: {arguments.folder}", highlight=False)
    console.print(
        f"A picture of both: python examples/picture.py {arguments.folder} picture.svg. "
        "Your own model: docs/GUIDE.md, or `hybridtrainer init`.",
        highlight=False,
    )


if __name__ == "__main__":
    main()
