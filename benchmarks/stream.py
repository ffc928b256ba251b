"""The streaming engine on a GPU, row by row of the table in docs/LOG.md, each in a process of its own.

python -m benchmarks.stream --rows 7b-16gb-16k 7b-8gb-16k
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, result, write_result

SETTINGS: dict[str, dict[str, Any]] = {
    "7b-16gb-16k": {"model": "llama-7b", "vram": "16GB", "tokens": 16384, "split": 4},
    # Of 8 GB and 4 GB cards, less what CUDA itself takes.
    "7b-8gb-16k": {"model": "llama-7b", "vram": "7.5GB", "tokens": 16384, "split": 4, "offload": True},
    "7b-8gb-4k": {"model": "llama-7b", "vram": "7GB", "tokens": 4096, "offload": True, "steps": 9},
    "7b-16gb-4k": {"model": "llama-7b", "vram": "16GB", "tokens": 4096, "steps": 9},
    "1.5b-4gb-8k": {"model": "gpt2-1.5b", "vram": "3.75GB", "tokens": 8192, "split": 1, "steps": 15},
    "50b-16gb-4k": {"model": "llama-50b", "vram": "14GB", "tokens": 4096, "mode": "factored"},
    "7b-16gb-2k": {"model": "llama-7b", "vram": "16GB", "tokens": 2048, "steps": 9},
    "7b-16gb-8k": {"model": "llama-7b", "vram": "16GB", "tokens": 8192},
    "7b-16gb-32k": {"model": "llama-7b", "vram": "16GB", "tokens": 32768, "split": 4, "offload": True},
    "350m-2gb-16k": {"model": "gpt2-350m", "vram": "2GB", "tokens": 16384, "split": 2, "steps": 15},
    "124m-1gb-8k": {"model": "gpt2-124m", "vram": "1.25GB", "tokens": 8192, "steps": 15},
}


def newest_rows() -> dict[str, dict[str, Any]]:
    """Each row as it was measured last: 2k and 8k tokens before the host did less for a block, 32k before packing."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("stream_older", "stream_packed", "stream"):
        found |= result(name)["rows"]
    return {name: found[name] for name in SETTINGS}


def measure(row: str) -> dict[str, Any]:
    """One row, in this process."""
    from hybridtrainer.bench.stream import StreamCase, measure_stream
    from hybridtrainer.config_memory import MemoryConfig

    chosen = SETTINGS[row]
    memory = MemoryConfig(
        mode=chosen.get("mode", "split8"),
        vram=chosen["vram"],
        split=chosen.get("split", 1),
        max_gpu_blocks=chosen.get("slots", 3),
        offload_activations=chosen.get("offload", False),
    )
    case = StreamCase(chosen["model"], memory, tokens=chosen["tokens"], steps=chosen.get("steps", 3), clip_norm=1.0)
    return measure_stream(case)


def show(row: str, found: dict[str, Any]) -> str:
    gib = 2**30
    return (
        f"{row:14} {found['tokens_per_second']:8.0f} tok/s  {found['seconds_per_step']:6.3f} s  "
        f"{found.get('share_of_compute', 0):6.1%} of compute  reserved {found['reserved_peak_bytes'] / gib:5.2f} GiB "
        f"(allocated {found['allocated_peak_bytes'] / gib:5.2f}, context {found['context_bytes'] / gib:4.2f})  "
        f"host {found['host_bytes'] / 1e9:5.1f} GB, {found['host_bytes_per_parameter']:.2f} B/param  "
        f"{found['model_tflops']:4.0f} TFLOP/s  kept {found['kept_weights']}+{found['kept_states']}  "
        f"{'packed' if found['packed'] else 'plain'}  split {found['split']}  ready {found['ready_seconds']:.0f} s  "
        f"loss {found['losses'][0]:.3f} to {found['losses'][-1]:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--one", choices=list(SETTINGS), help="measure one row in this process and print its JSON")
    parser.add_argument("--name", default="stream")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    rows: dict[str, Any] = {}
    for row in arguments.rows:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.stream", "--one", row],
            env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            print(f"{row}: failed with {done.returncode}", flush=True)
            continue
        rows[row] = json.loads(done.stdout.splitlines()[-1])
        print(show(row, rows[row]), flush=True)
        write_result(arguments.name, {"rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
