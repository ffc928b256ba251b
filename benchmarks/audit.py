"""Can a comparison be trusted? Plain against plain, a planted slowdown and a planted loss of quality, on the digits.

Each repeat is a whole comparison with seeds of its own. Plain against plain should be told apart in at most one case
of twenty; an arm whose steps take 10% longer must be found slower, and one that loses 1% of its right answers
must be found to lose quality. Small nets run best on one thread: OMP_NUM_THREADS=1 python -m benchmarks.audit
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, write_result
from hybridtrainer.compare.arms import Arm, named_arms
from hybridtrainer.compare.audit import compare
from hybridtrainer.compare.options import Options
from hybridtrainer.config import RunConfig
from hybridtrainer.config_io import load_config
from hybridtrainer.observe.progress import Silence
from hybridtrainer.tasks import Task, build_task

SLOWDOWN = 0.10
LOSS = 0.01


def planted(config: RunConfig) -> Task:
    """The run that the configuration asks for, spoilt where the name of its arm says so."""
    task = build_task(config)
    if "slower" in config.run.name:
        step = task.trainer.step

        def slower(batch: Any) -> Any:
            began = time.perf_counter()
            result = step(batch)
            end = time.perf_counter() + SLOWDOWN * (time.perf_counter() - began)
            while time.perf_counter() < end:
                pass
            return result

        task.trainer.step = slower  # type: ignore[method-assign]
    if "worse" in config.run.name:
        honest = task.metrics["accuracy"]
        task = replace(task, metrics={"accuracy": lambda model, batch: honest(model, batch) * (1 - LOSS)})
    return task


def repeat(arms: list[Arm], number: int, seeds: int) -> list[dict[str, Any]]:
    """One comparison, with seeds that no other has."""
    with tempfile.TemporaryDirectory() as folder:
        options = Options(seeds=seeds, first_seed=seeds * number)
        result = compare(arms, Path(folder) / "comparison", options, Silence(), planted)
    return [{"repeat": number, **comparison} for comparison in result["comparisons"]]


def shown(speed: dict[str, Any] | None) -> str:
    if speed is None:
        return "did not reach the target"
    return f"speed {speed['mean']:.3f} ({speed['low']:.3f} to {speed['high']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="of plain against plain")
    parser.add_argument("--planted", type=int, default=5, help="repeats with planted faults")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    plain = ["predict=off", "schedule.name=constant", "save_interval=1000000"]
    config = load_config("digits", [*plain, f"train.steps={arguments.steps}"])
    rows: list[dict[str, Any]] = []
    for names, repeats in ((("plain", "again"), arguments.repeats), (("plain", "slower", "worse"), arguments.planted)):
        arms = named_arms([(name, config) for name in names])
        for number in range(repeats):
            rows += repeat(arms, number, arguments.seeds)
            for row in rows[-len(arms) + 1 :]:
                print(f"{row['arm']:8}{number:4}  {row['verdict']:20} {shown(row['speedup'])}", flush=True)
    counts = {arm: Counter(row["verdict"] for row in rows if row["arm"] == arm) for arm in ("again", "slower", "worse")}
    same = [row["speedup"] for row in rows if row["arm"] == "again"]
    covered = sum(speed is not None and speed["low"] <= 1 <= speed["high"] for speed in same)
    content = {
        "seeds": arguments.seeds,
        "steps": arguments.steps,
        "plain_against_plain": {"repeats": len(same), "interval_contains_1": covered},
        "verdicts": {arm: dict(count) for arm, count in counts.items()},
        "comparisons": rows,
    }
    path = write_result("audit", content, arguments.out)
    print(f"plain against plain: the interval contains 1 in {covered} of {len(same)}")
    for arm in ("slower", "worse"):
        print(f"{arm}: {dict(counts[arm])}")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
