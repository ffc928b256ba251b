"""Tunes the plain arms of the named tasks: learning rate, schedule and length, with and without averaged read-out.

The best of each is what `named_tasks.py` trains. Candidates run side by side in several processes, so this measures
steps to the target, not seconds.

python -m benchmarks.tune_tasks --data FOLDER --tasks fashion-mnist fashion-mnist-small mnist --device cuda --workers 12
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RESULTS, write_result
from hybridtrainer.compare.arms import EVALUATIONS
from hybridtrainer.compare.curve import Curve, Point
from hybridtrainer.compare.options import Candidate, Grid
from hybridtrainer.compare.tuning import TUNING_SEED, choose
from hybridtrainer.compare.verdict import level
from hybridtrainer.config_io import parse_config
from hybridtrainer.named_tasks import NAMED_TASKS
from hybridtrainer.tasks import build_task

FOLDERS = {"mnist": "mnist", "fashion-mnist": "fashion-mnist", "fashion-mnist-small": "fashion-mnist"}
METRIC = {"stdlib-gpt": "loss", "text": "loss"}


def train(task: str, readout: str, candidate: Candidate, data: str | None, device: str) -> list[dict[str, float]]:
    """The evaluations of one candidate; empty where it diverged."""
    torch.set_num_threads(1)
    settings: dict[str, Any] = NAMED_TASKS[task].settings
    if data is not None and task in FOLDERS:
        settings = settings | {"data": settings["data"] | {"path": f"{data}/{FOLDERS[task]}"}}
    settings = settings | {"predict": "off", "readout": readout, "seed": TUNING_SEED}
    settings = settings | {"train": settings["train"] | {"device": device}}
    config = candidate.apply(parse_config(settings))
    try:
        return build_task(config).fit(None, "off").evaluations
    except Exception as error:  # a candidate may diverge
        print(f"{task} {readout} {candidate.name}: {error}", flush=True)
        return []


def curve(evaluations: list[dict[str, float]], metric: str) -> Curve | None:
    points = tuple(Point(e["step"], e["step"], e[metric], e["step"], e["step"]) for e in evaluations)
    return Curve(points, metric == "accuracy") if len(points) >= EVALUATIONS // 2 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["digits", "stdlib-gpt"], choices=sorted(NAMED_TASKS))
    parser.add_argument("--data", help="folder with mnist and fashion-mnist")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    parser.add_argument("--schedules", nargs="+", default=["constant", "cosine", "linear"])
    parser.add_argument("--lengths", type=float, nargs="+", default=[1.0, 0.6])
    parser.add_argument("--name", default="tune_tasks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    grid = Grid(tuple(arguments.rates), tuple(arguments.schedules), tuple(arguments.lengths))
    jobs = [
        (task, readout, candidate)
        for task in arguments.tasks
        for readout in ("last", "averaged")
        for candidate in grid.candidates()
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        made = list(pool.map(train, *zip(*jobs, strict=True), *([value] * len(jobs) for value in (
            f"{arguments.data}" if arguments.data else None, arguments.device
        ))))  # fmt: skip
    curves = {
        job: curve(evaluations, METRIC.get(job[0], "accuracy")) for job, evaluations in zip(jobs, made, strict=True)
    }
    rows: dict[str, Any] = {}
    for task in arguments.tasks:
        known = NAMED_TASKS[task]
        full = [c for (name, _, candidate), c in curves.items() if name == task and candidate.length == 1 and c]
        values = [value for c in full if (value := level(c)) is not None]
        best = max(values) if full[0].higher_is_better else min(values)
        goals = {"best plain": best} | ({"yardstick": known.target} if known.target is not None else {})
        rows[task] = {"goals": goals, "chosen": {}, "candidates": []}
        for readout in ("last", "averaged"):
            found = {candidate: c for (name, kind, candidate), c in curves.items() if (name, kind) == (task, readout)}
            for label, goal in goals.items():
                chosen = choose(found, goal)
                reached = (c := found[chosen]) and c.reached(goal)
                final = c and c.final()
                rows[task]["chosen"][f"{readout}, {label}"] = {
                    "candidate": chosen.name,
                    "steps": reached.step if reached else None,
                    "final": final.value if final else None,
                }
                print(
                    f"{task:20} {readout:9} {label:11} {goal:.4f}  {chosen.name:32} "
                    f"steps {reached.step if reached else float('nan'):7.0f}  final {final.value if final else 0:.4f}"
                )
            for candidate, c in found.items():
                end = c.final() if c else None
                rows[task]["candidates"].append(
                    {
                        "readout": readout,
                        "candidate": candidate.name,
                        "final": end.value if end else None,
                        "steps_to": {
                            label: (point.step if c and (point := c.reached(goal)) else None)
                            for label, goal in goals.items()
                        },
                    }
                )
    print(f"written to {write_result(arguments.name, {'seed': TUNING_SEED, 'tasks': rows}, arguments.out)}")


if __name__ == "__main__":
    main()
