"""What log, forecasts, memory records and a display cost: `fit` with all of them against a bare loop of `trainer.step`.

Three copies of the demo's GPT train side by side on the same batches, a few steps each in turn: a bare loop, `fit` with
plain lines, `fit` with the bar. The result is the median over blocks of the ratio to the bare loop, with a 95% interval
from resampling the blocks. Beside it stands what was spent inside the listeners, timed directly: on a machine that
others use, the ratio is noise around it.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.demo import settings
from rich.console import Console

from benchmarks.record import RESULTS, write_result
from hybridtrainer.data.endless import endless
from hybridtrainer.fit import Loop
from hybridtrainer.observe.progress import Bar, Lines, Progress
from hybridtrainer.run_folder import RunFolder
from hybridtrainer.signals import StopRequest
from hybridtrainer.tasks import build_task

TURN = 2
BLOCK = 12  # steps: in a run of 600 one round of forecasts and one or two memory records
Advance = Callable[[int], None]


def bare(steps: int) -> Advance:
    """A loop of `trainer.step` over the same batches."""
    task = build_task(settings(steps, predict="off"))
    batches = endless(task.loader, 1)

    def advance(until: int) -> None:
        while task.trainer.step_count < until:
            task.trainer.step(next(batches))

    return advance


def logged(steps: int, progress: Progress, folder: Path, stack: ExitStack, inside: list[float]) -> Advance:
    """`fit` with everything; what its listeners take is added to `inside`."""
    task = build_task(settings(steps, predict="off", save_interval=10**6))
    loop = Loop(task.trainer, task.loader, steps, progress, None, {}, steps)
    loop.keep_in(stack.enter_context(RunFolder(folder, 1)), False, None, stack)
    stack.enter_context(loop)
    stop = StopRequest()

    def timed(listener: Callable[[Any], None]) -> Callable[[Any], None]:
        def listen(record: Any) -> None:
            began = time.perf_counter()
            listener(record)
            inside[0] += time.perf_counter() - began

        return listen

    task.trainer.listeners[:] = [timed(listener) for listener in task.trainer.listeners]

    def advance(until: int) -> None:
        loop.advance(until, stop)

    return advance


def measure(arms: dict[str, Advance], steps: int) -> dict[str, list[float]]:
    """Seconds of each block for each arm; within a block the arms take turns, in changing order."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    orders = itertools.cycle(itertools.permutations(arms))
    for end in range(BLOCK, steps + 1, BLOCK):
        total = dict.fromkeys(arms, 0.0)
        for until in range(end - BLOCK + TURN, end + 1, TURN):
            for name in next(orders):
                began = time.perf_counter()
                arms[name](until)
                total[name] += time.perf_counter() - began
        if end > BLOCK:  # the first one warms up
            for name, value in total.items():
                seconds[name].append(value)
    return seconds


def interval(ratios: list[float]) -> list[float]:
    """A 95% interval of the median, from resampled blocks."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(2000))
    return [medians[49], medians[1949]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of each arm")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    inside = {"lines": [0.0], "bar": [0.0]}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        terminal = stack.enter_context(Path(os.devnull).open("w"))
        shows: dict[str, Progress] = {
            "lines": Lines("run", io.StringIO()),
            "bar": Bar("run", Console(file=terminal, force_terminal=True, width=100)),
        }
        arms = {"bare loop": bare(arguments.steps)}
        for name, progress in shows.items():
            arms[name] = logged(arguments.steps, progress, scratch / name, stack, inside[name])
        seconds = measure(arms, arguments.steps)
    rows: dict[str, dict[str, Any]] = {}
    for name, values in seconds.items():
        ratios = [value / base for value, base in zip(values, seconds["bare loop"], strict=True)]
        step_ms = 1000 * statistics.median(values) / BLOCK
        rows[name] = {"ms_per_step": step_ms, "ratio": statistics.median(ratios), "interval": interval(ratios)}
        if name in inside:
            listeners_ms = 1000 * inside[name][0] / arguments.steps
            rows[name] |= {"listeners_ms_per_step": listeners_ms, "listeners_share": listeners_ms / step_ms}
    path = write_result(
        "logging_overhead", {"steps": arguments.steps, "block_steps": BLOCK, "rows": rows}, arguments.out
    )
    for name, row in rows.items():
        spread = " to ".join(f"{value:.4f}" for value in row["interval"])
        own = f"   listeners {row['listeners_ms_per_step']:.3f} ms" if "listeners_share" in row else ""
        print(f"{name:10} {row['ms_per_step']:8.1f} ms/step   x {row['ratio']:.4f}   ({spread}){own}")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
