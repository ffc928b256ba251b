"""How long `hybridtrainer --help` takes, beside an interpreter that does nothing. The median of many runs in turns."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.record import RESULTS, write_result

COMMANDS = {"python": ["-c", "pass"], "hybridtrainer --help": ["-m", "hybridtrainer", "--help"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.runs):
        for name, command in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:22} {value:.3f} s")
    print(f"written to {write_result('startup', {'median_seconds': medians}, arguments.out)}")


if __name__ == "__main__":
    main()
