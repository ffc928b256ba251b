"""What jumps are worth so far: plain and hybrid from the same seeds, in turns, at equal clock.

Not a proof of speed: learning rates are not tuned and seeds are few. It shows whether the credit that jumps get is
honest (is the loss at equal clock as low as plain?) and what they save.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config_io import parse_config
from hybridtrainer.tasks import build_task

GPT: dict[str, Any] = {"model": {"name": "nano"}, "data": {"probe_batches": 1}}
CNN: dict[str, Any] = {"model": {"name": "cnn-small"}, "data": {"source": "digits", "validation_share": 0.2}}
TASKS: dict[str, dict[str, Any]] = {
    "gpt, constant rate": {**GPT, "optimizer": {"lr": 2e-3}, "schedule": {"name": "constant"}},
    "gpt, cosine": {**GPT, "optimizer": {"lr": 4e-3}, "schedule": {"name": "cosine"}},
    "digits, constant rate": {**CNN, "optimizer": {"lr": 2e-3, "weight_decay": 0.0}, "schedule": {"name": "constant"}},
}
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"predict": "off"},
    # Jumps are named, because "auto" makes none where the rate falls.
    "conservative": {"preset": "conservative", "predict": ["jumps"]},
    "aggressive": {"preset": "aggressive", "predict": ["jumps"]},
}


def run(task: dict[str, Any], arm: dict[str, Any], steps: int, seed: int) -> dict[str, float]:
    train = {"steps": steps, "batch_size": 16, "eval_interval": max(1, steps // 20), "eval_batches": 16}
    built = build_task(parse_config({**task, **arm, "seed": seed, "train": train}))
    result = built.fit(None, "off")
    counted = built.trainer.statistics()
    return {
        # One evaluation of a noisy run says little; the mean of the last three is steadier.
        "loss": statistics.fmean(evaluation["loss"] for evaluation in result.evaluations[-3:]),
        "seconds": result.training_seconds,
        "real_steps": counted.real_steps,
        "kept": counted.jumps_kept,
        "refused": counted.jumps_refused,
        "rolled_back": counted.jumps_rolled_back,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    for task_name, task in TASKS.items():
        rows[task_name] = {arm: [] for arm in ARMS}
        for seed in range(arguments.seeds):
            for arm_name, arm in ARMS.items():
                rows[task_name][arm_name].append(run(task, arm, arguments.steps, seed))
    path = write_result("jumps", {"steps": arguments.steps, "seeds": arguments.seeds, "runs": rows}, arguments.out)
    print(f"{arguments.steps} steps on the clock, mean of {arguments.seeds} seeds; loss and time relative to plain")
    print(
        f"{'task':24}{'arm':14}{'loss':>8}{'vs plain':>10}{'real':>7}{'kept':>6}{'refused':>9}{'undone':>8}{'time':>7}"
    )
    for task_name, arms in rows.items():
        for arm_name, runs in arms.items():
            mean = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
            pairs = list(zip(runs, arms["plain"], strict=True))
            loss = statistics.fmean(a["loss"] / b["loss"] - 1 for a, b in pairs)
            seconds = statistics.fmean(a["seconds"] / b["seconds"] for a, b in pairs)
            print(
                f"{task_name:24}{arm_name:14}{mean['loss']:8.4f}{loss:+10.2%}{mean['real_steps']:7.0f}{mean['kept']:6.1f}"
                f"{mean['refused']:9.1f}{mean['rolled_back']:8.1f}{seconds:7.2f}"
            )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
