"""How good the forecasts of the training loss are: coverage of their 90% intervals, and error against persistence.

The outlook is fed a run's losses step by step, as `fit` does it, and every forecast is compared with what came: the
mean loss over the smoothing window that ends at its target. Persistence says that the smoothed loss stays as it is.
Give run folders, or none to train the runs of `RUNS` (about three minutes on two cores).
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config_io import parse_config
from hybridtrainer.observe.lookout import Lookout
from hybridtrainer.observe.outlook import smoothing_steps
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.records import LossForecast, Phase, StepResult
from hybridtrainer.tasks import build_task

TEXT: dict[str, Any] = {"model": {"name": "nano", "context": 48}, "optimizer": {"lr": 2e-3}}
DIGITS: dict[str, Any] = {"model": {"name": "cnn-small"}, "data": {"source": "digits"}, "optimizer": {"lr": 2e-3}}
RUNS: dict[str, dict[str, Any]] = {
    f"{data}, {rate}, seed {seed}": settings
    | {"schedule": {"name": rate}, "seed": seed, "train": {"steps": steps, "batch_size": size, "eval_interval": steps}}
    for data, settings, size in (("GPT", TEXT, 8), ("digits", DIGITS, 16))
    for rate, seed, steps in (("constant", 21, 600), ("cosine", 22, 600), ("linear", 23, 400), ("cosine", 24, 300))
}
RUNS["GPT, constant, jumps, seed 25"] = TEXT | {
    "preset": "conservative", "seed": 25, "train": {"steps": 600, "batch_size": 8, "eval_interval": 600},
}  # fmt: skip


class Outcome(NamedTuple):
    """One forecast and what came of it."""

    made_at: float
    covered: bool
    error: float
    persistence_error: float
    width: float


def losses_of(folder: Path) -> tuple[dict[int, float], int]:
    """The losses of a run's real steps, by the clock, and where the clock ended; what was rolled back is left out."""
    losses: dict[int, float] = {}
    clock = 0
    for record in read_log(folder / "log.jsonl"):
        if record["kind"] == "step":
            clock = int(record["step"])
            losses = {step: loss for step, loss in losses.items() if step < clock} if clock in losses else losses
            if not record["predicted"] and math.isfinite(float(record["loss"])):
                losses[clock] = float(record["loss"])
    return losses, clock


def smoothed(losses: Mapping[int, float], target: int, window: int) -> float | None:
    """The mean loss over the window that ends at `target`."""
    found = [losses[step] for step in range(target - window + 1, target + 1) if step in losses]
    return statistics.fmean(found) if found else None


def judge(losses: Mapping[int, float], steps: int) -> tuple[dict[str, list[Outcome]], list[float]]:
    """Outcomes of all near forecasts and of all final ones, and what each round of both took in milliseconds."""
    window = smoothing_steps(steps)
    told: list[LossForecast] = []
    lookout = Lookout(steps, told.append)
    outcomes: dict[str, list[Outcome]] = {"near": [], "final": []}
    milliseconds = []
    for step, loss in sorted(losses.items()):
        began = time.perf_counter()
        lookout.record(StepResult(step, Phase.FULL, loss, 0, None, 0.0, ""))
        if told:
            milliseconds.append(1000 * (time.perf_counter() - began))
        for kind, forecast in zip(outcomes, told, strict=False):
            came, now = smoothed(losses, forecast.target_step, window), smoothed(losses, step, window)
            if came is not None and now is not None:
                outcomes[kind].append(
                    Outcome(
                        step / steps,
                        forecast.low <= came <= forecast.high,
                        abs(forecast.loss - came),
                        abs(now - came),
                        forecast.high - forecast.low,
                    )
                )
        told.clear()
    return outcomes, milliseconds


def summary(outcomes: list[Outcome], final_loss: float) -> dict[str, float]:
    """Coverage, and errors as shares of the run's final loss."""
    later = [outcome for outcome in outcomes if outcome.made_at >= 0.5]
    return {
        "forecasts": len(outcomes),
        "coverage": statistics.fmean(outcome.covered for outcome in outcomes),
        "error": statistics.fmean(outcome.error for outcome in outcomes) / final_loss,
        "persistence_error": statistics.fmean(outcome.persistence_error for outcome in outcomes) / final_loss,
        "width": statistics.fmean(outcome.width for outcome in outcomes) / final_loss,
        "coverage_second_half": statistics.fmean(outcome.covered for outcome in later),
        "error_second_half": statistics.fmean(outcome.error for outcome in later) / final_loss,
        "persistence_error_second_half": statistics.fmean(outcome.persistence_error for outcome in later) / final_loss,
    }


def train_runs(folder: Path) -> dict[str, Path]:
    """Trains the runs of `RUNS`."""
    for number, (name, settings) in enumerate(RUNS.items()):
        print(f"training {name} ...", flush=True)
        config = parse_config({"save_interval": 10**6, **settings}, name)
        build_task(config).fit(folder / str(number), "off")
    return {name: folder / str(number) for number, name in enumerate(RUNS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="run folders; trained where none is given")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, dict[str, float]]] = {}
    pooled: dict[str, list[Outcome]] = {"near": [], "final": []}
    milliseconds: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = {run.name: run for run in arguments.runs} or train_runs(Path(scratch))
        for name, folder in folders.items():
            losses, steps = losses_of(folder)
            outcomes, took = judge(losses, steps)
            milliseconds += took
            final = smoothed(losses, steps, smoothing_steps(steps)) or math.nan
            rows[name] = {kind: summary(found, final) for kind, found in outcomes.items()}
            for kind, found in outcomes.items():
                pooled[kind] += found
    means = {
        kind: {
            key: statistics.fmean(row[kind][key] for row in rows.values()) for key in next(iter(rows.values()))[kind]
        }
        for kind in pooled
    }
    coverage = {kind: statistics.fmean(outcome.covered for outcome in found) for kind, found in pooled.items()}
    content = {"coverage": coverage, "means": means, "milliseconds": statistics.median(milliseconds), "runs": rows}
    path = write_result("outlook", content, arguments.out)
    print(f"{'':30} {'':6} coverage   error  persistence   second half: error  persistence   (of the final loss)")
    for name, kinds in {**rows, "mean": means}.items():
        for kind, row in kinds.items():
            print(
                f"{name:30} {kind:6} {row['coverage']:8.2f} {row['error']:7.3f} {row['persistence_error']:12.3f} "
                f"{row['error_second_half']:20.3f} {row['persistence_error_second_half']:12.3f}"
            )
    print(f"a round of both forecasts takes {content['milliseconds']:.2f} ms\nwritten to {path}")


if __name__ == "__main__":
    main()
