"""How often intervals hold the truth, and how often two equal arms are told apart, for few seeds. Nothing is trained.

The first part draws normal differences and counts how often the 95% interval of their mean holds it: a plain
percentile bootstrap, and the stretched one that comparisons use. The second judges two arms whose curves differ by
noise alone, on a plateau, with the median of one of them as target, and counts intervals of the speed that leave out 1.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.record import RESULTS, write_result
from hybridtrainer.compare.average import AverageRun, speed_ratio
from hybridtrainer.compare.curve import Curve, Point
from hybridtrainer.compare.interval import Interval, stretched
from hybridtrainer.compare.verdict import level, median_target

SEEDS = (2, 3, 5, 8)
RESAMPLES = 1000


def coverage(seeds: int, repeats: int, draw: random.Random) -> dict[str, float]:
    """Share of intervals that hold the true mean, 0."""
    plain = better = 0
    for _ in range(repeats):
        values = [draw.gauss(0, 1) for _ in range(seeds)]
        means = sorted(fmean(draw.choices(values, k=seeds)) for _ in range(RESAMPLES))
        plain += means[RESAMPLES // 40 - 1] <= 0 <= means[-RESAMPLES // 40]
        found = stretched(fmean(values), means, seeds)
        better += (found.low or 0) <= 0 <= (found.high or 0)
    return {"percentile": plain / repeats, "stretched": better / repeats}


def plateau(draw: random.Random) -> Curve:
    """Fifty evaluations of a run that has learned nearly everything after a third; its steps vary in time by 3%."""
    top, pace = 0.97 + draw.gauss(0, 0.003), math.exp(draw.gauss(0, 0.03))
    points = (
        Point(step, pace * step, top * (1 - math.exp(-step / 5)) + draw.gauss(0, 0.003), step, step)
        for step in range(1, 51)
    )
    return Curve(tuple(points), higher_is_better=True)


def _speed(ours: list[Curve], theirs: list[Curve]) -> Interval | None:
    levels = [level(curve) for curve in theirs]
    runs = [AverageRun(curves, lambda point: point.seconds) for curves in (ours, theirs)]
    return speed_ratio(
        runs[0], runs[1], len(ours), lambda chosen: median_target([levels[seed] for seed in chosen], 0.002, True)
    )


def told_apart(seeds: int, repeats: int, draw: random.Random) -> dict[str, float]:
    """Share of comparisons of two equal arms whose interval lies above 1, or below."""
    above = below = 0
    for _ in range(repeats):
        ours, theirs = ([plateau(draw) for _ in range(seeds)] for _ in range(2))
        found = _speed(ours, theirs)
        above += found is not None and found.low is not None and found.low > 1
        below += found is not None and found.high is not None and found.high < 1
    return {"faster": above / repeats, "slower": below / repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000, help="of the first part")
    parser.add_argument("--comparisons", type=int, default=300, help="of the second part")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    draw = random.Random(0)
    rows: dict[str, Any] = {}
    print(f"{'seeds':>6}{'percentile':>12}{'stretched':>12}{'faster':>9}{'slower':>9}")
    for seeds in SEEDS:
        row = coverage(seeds, arguments.repeats, draw) | told_apart(seeds, arguments.comparisons, draw)
        rows[str(seeds)] = row
        print(
            f"{seeds:6}{row['percentile']:12.3f}{row['stretched']:12.3f}{row['faster']:9.3f}{row['slower']:9.3f}",
            flush=True,
        )
    content = {"repeats": arguments.repeats, "comparisons": arguments.comparisons, "seeds": rows}
    print(f"written to {write_result('intervals', content, arguments.out)}")


if __name__ == "__main__":
    main()
