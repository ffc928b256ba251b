"""What was promised beside what came out: the first table of docs/VALIDATION.md."""

from __future__ import annotations

from statistics import fmean

from benchmarks.record import gib, result
from benchmarks.validation.cells import change, fall, table
from benchmarks.validation.faults import GROWTH, growth
from benchmarks.validation.results import (
    Measured,
    by_seed,
    differences,
    everything,
    net_cost,
    plan_error,
    plans_now,
    reserved,
    validated_speed,
)
from benchmarks.validation.rows import ROWS

Line = tuple[str, str, bool]

SMALL_CARDS = {
    "1.5B in less than 4 GiB": "1.5b 4 GB",
    "7B in less than 8 GiB": "7b 8 GB",
    "50B in less than 14 GiB": "50b 16 GB",
    "124M plain, in fp32, in less than 5 GB": "124m fp32",
}
PLAN_LIMIT = 0.05
QUALITY_LIMIT = 0.02


def promises() -> str:
    """The table: what was promised, what came out, whether that is kept."""
    rows = everything()
    diverged = sum(row["divergences"] for row in rows.values())
    lines = [
        *(_fits(said, rows[name], ROWS[name].promise) for said, name in SMALL_CARDS.items()),
        *_speed(rows),
        *_memory(rows),
        _plans(rows),
        ("no divergence", f"{diverged} in {len(rows)} runs", not diverged),
        *_quality(),
        _faults(),
    ]
    return table(
        ("promised", "came out", ""),
        [(said, found, "yes" if kept else "**not wholly**") for said, found, kept in lines],
    )


def _fits(said: str, row: Measured, promise: float | None) -> Line:
    falls = row["last_loss"] < row["first_loss"]
    return said, f"{reserved(row):.2f} GiB, {fall(row)}", promise is not None and reserved(row) < promise and falls


def _speed(rows: dict[str, Measured]) -> list[Line]:
    streamed = result("stream")["rows"]
    quick, fifty = streamed["7b-8gb-16k"]["share_of_compute"], streamed["50b-16gb-4k"]["seconds_per_step"]
    return [
        ("7B at full speed in 8 GB", f"{quick:.1%} of the same without copies at 16k tokens a step", quick > 1 / 1.05),
        (
            "50B at 4 s a step",
            f"{fifty:.2f} s alone on its machine, {rows['50b 16 GB']['seconds_per_step']:.1f} s in this run, the first "
            "steps included",
            fifty <= 4,
        ),
    ]


def _memory(rows: dict[str, Measured]) -> list[Line]:
    predict = gib(rows["124m all"]["phase_bytes"]["predict"])
    medium = reserved(rows["350m all, streamed"])
    return [
        (
            "124M, all options: less than 1 GB in Predict",
            f"{predict:.2f} GiB in use",
            predict < (ROWS["124m all"].predict_promise or 0.0),
        ),
        (
            "350M, all options: less than 2 GB",
            f"{medium:.2f} GiB streamed; resident with all options {reserved(rows['350m all, resident']):.2f} GiB",
            medium < (ROWS["350m all, streamed"].promise or 0.0),
        ),
    ]


def _plans(rows: dict[str, Measured]) -> Line:
    worst, name = max((abs(plan_error(row)), name) for name, row in rows.items())
    now = max(plans_now().values())
    told = f"all {len(plans_now())} within {now:.1%} as they are counted now"
    if worst > PLAN_LIMIT:
        told += f"; when the runs were made, off by up to {worst:.1%} ({name}), see below"
    return "plans within 5% of memory", told, now <= PLAN_LIMIT


def _quality() -> list[Line]:
    """Every run with jumps or `auto` beside its plain one; of several seeds the mean counts."""
    (auto,) = differences("124m auto")
    jumps = {name: differences(f"124m {name}") for name in ("conservative", "aggressive", "all")}
    means = {name: fmean(found) for name, found in jumps.items()}
    single = [each for found in jumps.values() for each in found]
    medium = {name: differences(f"350m {name}") for name in ("aggressive", "all, resident", "all, streamed")}
    larger = [each for (each,) in medium.values()]
    steps = everything()["350m plain"]["settings"]["train"]["steps"]
    costs = [net_cost(row) for name in jumps for row in by_seed(f"124m {name}")]
    (seeds,) = {len(found) for found in jumps.values()}
    return [
        (
            "hybrid perplexity within 2% of plain: `auto`",
            f"{auto:+.1%}, and plain's last loss {validated_speed():.2f} times as fast",
            auto <= QUALITY_LIMIT,
        ),
        (
            "the same: 124M, jumps alone at a constant rate, `conservative`, `aggressive`, all options",
            f"{', '.join(change(each) for each in means.values())} (means of {seeds} seeds; single ones "
            f"{change(min(single))} to {change(max(single))}); {min(costs):.1%} to {max(costs):.1%} of the time lost",
            max(means.values()) <= QUALITY_LIMIT,
        ),
        (
            "the same: 350M, `aggressive`, all options resident, all streamed",
            f"{', '.join(change(each) for each in larger)} (one seed, {steps} steps)",
            max(larger) <= QUALITY_LIMIT,
        ),
    ]


def _faults() -> Line:
    on_cpu, on_gpu = result("validation_faults"), result("faults_gpu")
    host, host_of_gpu = (growth(each["quiet"]["memory"], "host_bytes") or 0.0 for each in (on_cpu, on_gpu))
    card = growth(on_gpu["quiet"]["memory"], "device_reserved_bytes") or 0.0
    equal = on_cpu["equal"] and on_gpu["equal"]
    return (
        "killed, NaN, no memory: nothing lost, nothing grows",
        f"{'equal bit for bit' if equal else 'not equal'} after {on_cpu['quiet']['steps']:,} steps with "
        f"{len(on_cpu['killed']['killed_at'])} kills on a CPU, host memory {change(host)}, and after "
        f"{on_gpu['quiet']['steps']:,} with {len(on_gpu['killed']['killed_at'])} on the GPU, host memory "
        f"{change(host_of_gpu)}, the GPU's {change(card)}",
        equal and max(host, host_of_gpu, card) < GROWTH,
    )
