"""A long run with faults on the way: killed, gradients that are NaN, too little memory. Nothing may be lost or grow.

python -m benchmarks.validation.faults --steps 2000

Two runs of one configuration meet the same gradients that are NaN and the same lack of GPU memory. One of them is
killed with SIGKILL three times besides, and resumed. In the end both must have the same weights, bit for bit, and must
have made all steps; the memory of the one that was not killed must be at its end what it was after a third of the run,
when it has all the windows that jumps are forecast from.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config_io import parse_config
from hybridtrainer.observe.runlog import read_log
from hybridtrainer.tasks import build_task
from hybridtrainer.trainer import HybridTrainer
from hybridtrainer.tree import fingerprint

KILLS = 3
GROWTH = 0.01
SHORT = 0.8  # of what a step needs beside what is there, in steps that lack memory


class Faults:
    """A hook: after some steps a gradient is NaN, in others the GPU has not the memory that a step needs.

    Args:
        steps: Of the run.
        limit: A file with the bytes that such a step has, so that all runs and all their stretches lack the same.
    """

    def __init__(self, steps: int, limit: Path) -> None:
        self._nan_steps = {steps // 5, steps // 2, steps // 2 + 1}
        self._short_steps = {steps // 8, steps // 4}  # before growth is looked at: smaller parts take less
        self._limit = limit

    def before_step(self, trainer: HybridTrainer, _: Any) -> None:
        """Decides by the clock, so that a resumed run meets the same faults."""
        if not torch.cuda.is_available():
            return
        torch.cuda.set_per_process_memory_fraction(1.0)
        if trainer.step_count in self._short_steps:
            torch.cuda.empty_cache()
            if not self._limit.exists():
                there, needed = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
                self._limit.write_text(str(round(there + SHORT * (needed - there))))
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(int(self._limit.read_text()) / total)

    def after_backward(self, trainer: HybridTrainer) -> None:
        """One gradient that no update may use."""
        if trainer.step_count in self._nan_steps:
            next(each.grad for each in trainer.model.parameters() if each.grad is not None).fill_(torch.nan)


def train(settings: dict[str, Any], folder: Path) -> None:
    """One stretch of a run, from its newest checkpoint where there is one; leaves its weights' digest."""
    _strict()
    task = build_task(parse_config(settings))
    task.trainer.hooks.add(Faults(task.config.train.steps, folder.parent / "limit"))
    result = task.fit(folder, "off", resume=folder.exists())
    digest = fingerprint({"model": dict(task.trainer.model.state_dict())})["all"]
    (folder / "digest.json").write_text(json.dumps({"steps": result.steps, "digest": digest}))


def run(settings: dict[str, Any], folder: Path, kills: int) -> dict[str, Any]:
    """Trains to the end in processes that are killed after some steps, `kills` times."""
    drawn, steps = random.Random(0), settings["train"]["steps"]
    killed_at: list[int] = []
    began = time.perf_counter()
    while True:
        child = multiprocessing.get_context("fork").Process(target=train, args=(settings, folder))
        child.start()
        if len(killed_at) < kills:
            _wait_for_steps(child, folder, drawn.randint(steps // 8, steps // 4))
        if len(killed_at) < kills and child.is_alive():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            killed_at.append(_clock(folder))
            continue
        child.join()
        if child.exitcode:
            raise SystemExit(f"the run failed with {child.exitcode}")
        break
    records = list(read_log(folder / "log.jsonl"))
    made = [record for record in records if record["kind"] == "step"]
    found: dict[str, Any] = json.loads((folder / "digest.json").read_text())
    return found | {
        "killed_at": killed_at,
        "seconds": time.perf_counter() - began,
        "clock_is_whole": [step["step"] for step in made] == sorted({step["step"] for step in made}),
        "skipped": [step["step"] for step in made if step.get("skipped")],
        "notices": [record["text"] for record in records if record["kind"] == "notice"],
        "last_loss": made[-1]["loss"],
        "memory": [
            {key: record[key] for key in ("step", "host_bytes", "device_reserved_bytes")}
            for record in records
            if record["kind"] == "memory"
        ],
    }


def growth(memory: list[dict[str, Any]], key: str) -> float | None:
    """How much more is taken in the last tenth than in the one that begins after a third, as a share."""
    values = [record[key] for record in memory if record[key] is not None]
    tenth = len(values) // 10
    if not tenth:
        return None
    third = len(values) // 3
    early, late = max(values[third : third + tenth]), max(values[-tenth:])
    return float(late / early - 1)


def _clock(folder: Path) -> int:
    log = folder / "log.jsonl"
    steps = [record["step"] for record in read_log(log) if record["kind"] == "step"] if log.exists() else []
    return int(steps[-1]) if steps else 0


def _wait_for_steps(child: Any, folder: Path, count: int) -> None:
    until = _clock(folder) + count
    while child.is_alive() and _clock(folder) < until:
        time.sleep(0.5)


def _strict() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def _somewhere(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--saves", type=int, default=20, help="checkpoints in a run")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; nowhere where left out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    settings: dict[str, Any] = {
        "preset": "aggressive",
        "predict": ["jumps"],
        "model": {"name": arguments.model, "context": arguments.context},
        "train": {"batch_size": arguments.batch, "steps": arguments.steps, "eval_interval": arguments.steps},
        "optimizer": {"lr": 3e-4},
        "memory": {"precision": "bf16"},
        "save_interval": max(10, arguments.steps // arguments.saves),
    }
    with _somewhere(arguments.folder) as folder:
        quiet = run(settings, folder / "quiet", 0)
        killed = run(settings, folder / "killed", KILLS)
    found = {
        "settings": settings,
        "equal": quiet["digest"] == killed["digest"] and quiet["steps"] == killed["steps"],
        "host_growth": growth(quiet["memory"], "host_bytes"),
        "gpu_growth": growth(quiet["memory"], "device_reserved_bytes"),
        "quiet": quiet,
        "killed": killed,
    }
    print(f"equal: {found['equal']}; killed at {killed['killed_at']} of {quiet['steps']}")
    print(f"clock whole: {quiet['clock_is_whole']}, {killed['clock_is_whole']}; skipped {quiet['skipped']}")
    print(f"growth: host {found['host_growth']}, GPU {found['gpu_growth']}; notices {quiet['notices']}")
    write_result("validation_faults", found, arguments.out)
    grew = [each for each in (found["host_growth"], found["gpu_growth"]) if each is not None and each > GROWTH]
    sys.exit(0 if found["equal"] and not grew else 1)


if __name__ == "__main__":
    main()
