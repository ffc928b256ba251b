"""How much faster the kernels of the dynamics model are on a GPU than their references on a CPU, and that both agree.

Features: the 64 numbers from a full ring. Rollout: ten ticks of all three members of the model in its default size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import RESULTS, write_result
from hybridtrainer.kernels import feature_reference
from hybridtrainer.kernels.features import features
from hybridtrainer.kernels.rollout import Cell, rollout, rollout_reference
from hybridtrainer.predict.rssm import CLASSES, Size

TICKS = 10
ROUNDS, CALLS = 7, 200


def microseconds(call: Callable[[], Any], on_gpu: bool) -> float:
    """Median over rounds of the time of one call, the device waited for at the end of each round."""
    call()
    times = []
    for _ in range(ROUNDS):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began) / CALLS)
    return statistics.median(times)


def inputs() -> tuple[Tensor, Cell, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    d, categoricals, members = Size()
    z = categoricals * CLASSES

    def drawn(*shape: int) -> Tensor:
        values: Tensor = torch.randn(members, *shape, generator=generator) / shape[0] ** 0.5
        return values

    cell = Cell(drawn(z, 3 * d), drawn(1, 3 * d), drawn(d, 3 * d), drawn(1, 3 * d), drawn(d, z), drawn(1, z))
    rows = torch.rand(feature_reference.LENGTH, len(feature_reference.COLUMNS), generator=generator) + 0.5
    return rows, cell, torch.tanh(drawn(d)), torch.full((members, z), 1 / CLASSES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows, cell, h, z = inputs()
    gpu_rows, gpu_cell = rows.cuda(), Cell(*(part.cuda() for part in cell))
    gpu_h, gpu_z = h.cuda(), z.cuda()
    apart = {
        "features": (features(gpu_rows, 1000).cpu() - feature_reference.features(rows, 1000)).abs().max().item(),
        "rollout": (
            rollout(gpu_cell, gpu_h, gpu_z, TICKS, CLASSES).cpu() - rollout_reference(cell, h, z, TICKS, CLASSES)
        ).abs().max().item(),
    }  # fmt: skip
    with torch.no_grad():
        timed = {
            "features": {
                "cpu_reference": microseconds(lambda: feature_reference.features(rows, 1000), on_gpu=False),
                "gpu_reference": microseconds(lambda: feature_reference.features(gpu_rows, 1000), on_gpu=True),
                "gpu_kernel": microseconds(lambda: features(gpu_rows, 1000), on_gpu=True),
            },
            "rollout": {
                "cpu_reference": microseconds(lambda: rollout_reference(cell, h, z, TICKS, CLASSES), on_gpu=False),
                "gpu_reference": microseconds(
                    lambda: rollout_reference(gpu_cell, gpu_h, gpu_z, TICKS, CLASSES), on_gpu=True
                ),
                "gpu_kernel": microseconds(lambda: rollout(gpu_cell, gpu_h, gpu_z, TICKS, CLASSES), on_gpu=True),
            },
        }
    for name, row in timed.items():
        row["faster_than_cpu"] = row["cpu_reference"] / row["gpu_kernel"]
        print(f"{name:10} {row}, largest difference {apart[name]:.1e}")
    content = {"threads": arguments.threads, "microseconds": timed, "largest_difference": apart}
    print(f"written to {write_result('dynamics_kernels', content, arguments.out)}")


if __name__ == "__main__":
    main()
