"""Every kernel against its reference on this GPU, those of the dynamics model against a CPU too; kept as a result."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.record import RESULTS, write_result
from hybridtrainer.bench.kernels import describe, measure_kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measure_kernels(torch.device("cuda"))
    print(describe(rows))
    print(f"written to {write_result('kernels', {'threads': arguments.threads, 'kernels': rows}, arguments.out)}")


if __name__ == "__main__":
    main()
