"""Trains a small GPT on Python's own source, plain and hybrid in turns, with two seeds, and says what came out.

make demo          about four minutes on two cores
python examples/demo.py --steps 600
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridtrainer.compare.arms import Arm, named_arms
from hybridtrainer.compare.audit import StoppedError, compare
from hybridtrainer.compare.options import Options
from hybridtrainer.config import RunConfig
from hybridtrainer.config_io import parse_config
from hybridtrainer.observe.progress import make_progress
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.report import write_report

Records = list[dict[str, Any]]


def settings(steps: int, **more: Any) -> RunConfig:
    """The built-in GPT at a constant learning rate, so that every kind of foresight shows."""
    return parse_config(
        {
            "preset": "conservative",
            "warmup_steps": 40,
            "model": {"name": "nano"},
            "optimizer": {"name": "adamw", "lr": 2e-3},
            "schedule": {"name": "constant", "warmup_steps": 50},
            "data": {"probe_batches": 1},
            "train": {"steps": steps, "batch_size": 16, "eval_batches": 4, "eval_interval": max(1, steps // 50)},
            **more,
        }
    )


def arms(steps: int) -> list[Arm]:
    """The same run with prediction off and on."""
    return named_arms([("plain", settings(steps, predict="off")), ("hybrid", settings(steps))])


def show(console: Console, logs: dict[str, Records]) -> None:
    """Losses, steps and seconds of both arms."""
    table = Table("", *logs, title="The same GPT, data and seed; whole runs of seed 0", title_justify="left")
    rows: dict[str, list[str]] = {}
    for log in logs.values():
        steps = [record for record in log if record["kind"] == "step"]
        evaluation = [record for record in log if record["kind"] == "evaluation"][-1]
        cells = {
            "validation loss": f"{evaluation['loss']:.4f}",
            "steps on the clock": str(steps[-1]["step"]),
            "  real (backward pass computed)": str(sum(not step["predicted"] for step in steps)),
            "  foreseen": str(sum(step["predicted"] for step in steps)),
            "training time": f"{evaluation['training_seconds']:.1f} s",
        }
        for phase in ("warmup", "full", "predict", "correct"):
            cells[f"  {phase}"] = f"{sum(step['seconds'] for step in steps if step['phase'] == phase):.1f} s"
        for label, cell in cells.items():
            rows.setdefault(label, []).append(cell)
    for label, columns in rows.items():
        table.add_row(label, *columns)
    console.print(table)


def explain(console: Console, log: Records, folder: Path) -> None:
    """What was foreseen beside jumps, how many jumps had which fate, and why some were undone."""
    console.print()
    for record in log:
        if record["kind"] == "notice":
            console.print(f"Step {record['step']}: {record['text']}.", highlight=False)
    jumps = [record for record in log if record["kind"] == "jump"]
    count = {
        verdict: sum(jump["verdict"] == verdict for jump in jumps) for verdict in ("kept", "rolled back", "refused")
    }
    console.print("\nJumps: " + ", ".join(f"{number} {verdict}" for verdict, number in count.items()) + ".")
    shown = [jump for jump in jumps if jump["verdict"] in ("refused", "rolled back")]
    for jump in shown[:8]:
        console.print(f"  step {jump['step']:4}  {jump['verdict']:11}  {jump['reason']}", highlight=False)
    if len(shown) > 8:
        console.print(f"  ... and {len(shown) - 8} more in {folder / 'log.jsonl'}", highlight=False)


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}")
    arguments = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 110)
    try:
        result = compare(
            arms(arguments.steps), arguments.folder, Options(seeds=arguments.seeds), make_progress(name="demo")
        )
    except StoppedError as stopped:
        sys.exit(128 + stopped.signal)
    trials = {name: arguments.folder / "trials" / f"{name}-seed0" for name in ("plain", "hybrid")}
    logs = {name: read_log(folder / "log.jsonl") for name, folder in trials.items()}
    show(console, logs)
    explain(console, logs["hybrid"], trials["hybrid"])
    console.print(
        f"\nTime to the same loss, which is not that of whole runs, over {arguments.seeds} seeds: {result['headline']}",
        highlight=False,
    )
    console.print(
        "Untuned, short and with few seeds: this shows how a comparison works, and proves nothing. One that can: "
        "hybridtrainer compare stdlib-gpt --tune",
        highlight=False,
    )
    report = write_report([arguments.folder, *trials.values()], arguments.folder / "report.html")
    console.print(f"\nReport, open it in a browser: {report}", highlight=False)
    console.print("Your own model: docs/OWN_MODEL.md, or `hybridtrainer init`.", highlight=False)


if __name__ == "__main__":
    main()
