"""Plans beside what `benchmarks.stream` has measured: memory and seconds, row by row. Needs no GPU.

python -m benchmarks.plan_accuracy
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS
from hybridtrainer.config import MemoryConfig
from hybridtrainer.models.gpt import build_gpt
from hybridtrainer.planning.hardware import H200
from hybridtrainer.planning.pieces import rehearse_pieces
from hybridtrainer.planning.streamed import estimate_streamed

GIB = 1 << 30


def compare(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Planned and measured, with the link's speeds of that run."""
    case = row["case"]
    memory = MemoryConfig(**case["memory"])
    if not row["kept_weights"] and not row["kept_states"]:
        memory = memory.model_copy(update={"vram": None})  # the engine did not wait, and so kept nothing
    model = build_gpt(case["model"], context=case["context"], device="meta")
    assert memory.mode != "resident"
    pieces = rehearse_pieces(model, memory.mode, case["tokens"] // case["context"], case["context"], memory.split)
    found = estimate_streamed(pieces, memory, replace(H200, **row["link"]))
    return {
        "gpu": (found.gpu_bytes / GIB, row["reserved_peak_bytes"] / GIB),
        "host": (found.host_bytes / GIB, row["host_bytes"] / GIB),
        "seconds": (found.seconds or 0.0, row["seconds_per_step"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=RESULTS / "stream.json")
    arguments = parser.parse_args()
    print("| run | GPU, planned | reserved | host, planned | taken | a step, planned | measured |")
    print("|---|---|---|---|---|---|---|")
    for name, row in json.loads(arguments.result.read_text())["rows"].items():
        found = compare(row)
        cells = [
            f"{planned:.2f} {unit} ({planned / measured - 1:+.1%}) | {measured:.2f}"
            for (planned, measured), unit in zip(found.values(), ("GiB", "GiB", "s"), strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
