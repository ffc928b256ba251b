"""Plans beside what `benchmarks.stream` has measured: memory and seconds, row by row. Needs no GPU.

python -m benchmarks.plan_accuracy
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RESULTS
from hybridtrainer.config import MemoryConfig
from hybridtrainer.models.gpt import build_gpt
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.hardware import H200, Hardware
from hybridtrainer.planning.pieces import rehearse_pieces
from hybridtrainer.planning.streamed import estimate_streamed

GIB = 1 << 30
OLDER_LAUNCH = 64e-6  # of runs from before it was measured beside them: that of the plain loop at the time
BUSY = 1.2  # times what the host needs: then the GPU is never idle for its sake


def estimate(row: dict[str, Any], hardware: Hardware) -> Estimate:
    """The plan of a run that was measured."""
    case = row["case"]
    memory = MemoryConfig(**case["memory"])
    if not row["kept_weights"] and not row["kept_states"]:
        memory = memory.model_copy(update={"vram": None})  # the engine did not wait, and so kept nothing
    model = build_gpt(case["model"], context=case["context"], device="meta")
    assert memory.mode != "resident" and memory.mode != "auto"  # noqa: PLR1714, PT018
    pieces = rehearse_pieces(model, memory.mode, case["tokens"] // case["context"], case["context"], memory.split)
    return estimate_streamed(pieces, memory, hardware)


def compare(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Planned and measured, with the speeds of link and host of that run."""
    launch = row.get("launch_seconds", OLDER_LAUNCH)
    found = estimate(row, replace(H200, **row["link"], launch=launch))
    return {
        "gpu": (found.gpu_bytes / GIB, row["reserved_peak_bytes"] / GIB),
        "host": (found.host_bytes / GIB, row["host_bytes"] / GIB),
        "seconds": (found.seconds or 0.0, row["seconds_per_step"]),
    }


def fit(rows: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """The two speeds of computing that explain the runs without copies best, each run counting alike.

    Runs that wait for the host say nothing of the GPU's speed.
    """
    waiting = replace(H200, flops=math.inf, memory=math.inf)
    rows = {
        name: row
        for name, row in rows.items()
        if row["seconds_without_copies"] > BUSY * (estimate(row, waiting).compute_seconds or 0.0)
    }
    work = [
        [
            (estimate(row, replace(H200, flops=1.0, memory=math.inf, launch=0.0)).compute_seconds or 0.0) * 1e-12,
            (estimate(row, replace(H200, flops=math.inf, memory=1.0, launch=0.0)).compute_seconds or 0.0) * 1e-12,
        ]
        for row in rows.values()
    ]
    seconds = torch.tensor([[row["seconds_without_copies"]] for row in rows.values()], dtype=torch.float64)
    found = torch.linalg.lstsq(torch.tensor(work, dtype=torch.float64) / seconds, torch.ones_like(seconds)).solution
    per_flop, per_byte = found.flatten().tolist()
    return 1e12 / per_flop, 1e12 / per_byte


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=RESULTS / "stream.json")
    arguments = parser.parse_args()
    rows = json.loads(arguments.result.read_text())["rows"]
    print("| run | GPU, planned | reserved | host, planned | taken | a step, planned | measured |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        found = compare(row)
        cells = [
            f"{planned:.2f} {unit} ({planned / measured - 1:+.1%}) | {measured:.2f}"
            for (planned, measured), unit in zip(found.values(), ("GiB", "GiB", "s"), strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    flops, memory = fit(rows)
    print(f"\nspeeds fitted to these runs: {flops / 1e12:.0f} TFLOP/s, {memory / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
