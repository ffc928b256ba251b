"""What a forecaster that is always wrong costs: plain and hybrid step by step in turns, on the same batches.

The forecaster jumps backwards. It must be switched off after three jumps, the weights at the end must be those of plain
training bit for bit, and all it cost is time: at most 2% of the run.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config_io import parse_config
from hybridtrainer.predict import baselines
from hybridtrainer.predict.baselines import Forecast, Past
from hybridtrainer.tasks import Task, build_task


def backwards(past: Past, horizon: int, ahead: Tensor) -> Forecast:
    right = baselines.forecast("line_fit", past, horizon, ahead, trust_radius=1.0)
    return replace(right, coefficients=-right.coefficients, confidence=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    train = {"steps": arguments.steps, "batch_size": 16}
    arms: dict[str, Task] = {
        "plain": build_task(parse_config({"predict": "off", "train": train})),
        "always wrong": build_task(parse_config({"preset": "conservative", "train": train})),
    }
    arms["always wrong"].trainer.jumps.forecaster = backwards
    streams = {name: iter(task.loader) for name, task in arms.items()}
    for step in range(arguments.steps):
        for name in arms if step % 2 else reversed(arms):
            arms[name].trainer.step(next(streams[name]))
    counted = {name: task.trainer.statistics() for name, task in arms.items()}
    parts = {name: task.trainer.fingerprint() for name, task in arms.items()}
    wrong = counted["always wrong"]
    content = {
        "steps": arguments.steps,
        "time_over_plain": wrong.seconds / counted["plain"].seconds,
        "share_of_time_in_jumps": wrong.seconds_by_phase["predict"] / wrong.seconds,
        "jumps_refused": wrong.jumps_refused,
        "equal_weights": parts["plain"]["parameters"] == parts["always wrong"]["parameters"],
        "equal_optimizer": parts["plain"]["optimizer"] == parts["always wrong"]["optimizer"],
    }
    for name, value in content.items():
        print(f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}")
    print(f"written to {write_result('no_regret', content, arguments.out)}")


if __name__ == "__main__":
    main()
