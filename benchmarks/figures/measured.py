"""The measured numbers of docs/MEASURED.md."""

from __future__ import annotations

import statistics
from statistics import fmean

from benchmarks.figures.values import (
    Figures,
    at_most,
    gb,
    geometric,
    held,
    span,
    worst_ratios,
)
from benchmarks.record import gib, result

FEW_BITS = ("split8", "sr8", "sr4")


def measured() -> Figures:
    resident, checkpoint = result("resident_350m_4k")["rows"], result("stream_checkpoint_7b")
    bits, audit = result("low_bit")["modes"], result("audit")
    logs, outlook = result("logging_overhead")["rows"], result("outlook")
    cores, many, few = (result(f"overhead{name}")["rows"] for name in ("", "_h200_batch128", "_h200_batch8"))
    near, end = (
        outlook["means"][each]["error"] / outlook["means"][each]["persistence_error"] for each in ("near", "final")
    )
    ratios = geometric("persistence")
    above = [ratio for ratio in worst_ratios() if ratio >= 1]
    return {
        "| GPT-2 350M, 2 x 4096 tokens": [
            "{:.1f}, {:.1f}, {:.1f}, {:.1f} GiB reserved".format(
                *(gib(resident[way]["reserved_peak_bytes"]) for way in ("plain", "bf16", "bf16, checkpointing", "lean"))
            ),
            f"{gib(resident['jumps, both']['peak_bytes']['jump']):.1f} of them are in use",
        ],
        "| a 7B checkpoint": [
            f"{gb(checkpoint['checkpoint_bytes']):.1f} GB",
            f"{gb(checkpoint['saving']['extra_bytes']):.1f} GB of extra host memory to save",
            f"{gb(checkpoint['loading']['extra_bytes']):.2f} to load",
        ],
        "| 8-bit and 4-bit optimizer states": [
            f"within {at_most(max(abs(fmean(bits[each]['differences'])) for each in FEW_BITS), 3)} of fp32",
            f"spread by {statistics.stdev(curve[-1] for curve in bits['fp32']['curves']):.3f}",
        ],
        "| plain against plain": [
            "contains 1 in {interval_contains_1} of {repeats}".format(**audit["plain_against_plain"]),
            f"10% is found in {audit['verdicts']['slower']['slower']} of {sum(audit['verdicts']['slower'].values())}",
            f"answers in {audit['verdicts']['worse']['quality lost']} of {sum(audit['verdicts']['worse'].values())}",
        ],
        "| log, forecasts, memory and progress": [
            f"{logs['lines']['ratio']:.3f} with lines, {logs['bar']['ratio']:.3f} with the bar",
            f"(intervals up to {max(logs[way]['interval'][1] for way in ('lines', 'bar')):.2f})",
            f"{logs['lines']['listeners_share']:.1%} and {logs['bar']['listeners_share']:.1%} of a step",
        ],
        "| forecasts of the training loss": [
            f"cover {outlook['coverage']['near']:.2f} (a twentieth",
            f"and {outlook['coverage']['final']:.2f} (its end)",
            f"error {near:.2f} and {end:.2f} of persistence",
        ],
        "| forecasts of the loss 5, 20 and 50": [
            "error {:.2f}, {:.2f}, {:.2f} of persistence".format(*ratios),
            f"in {len(worst_ratios()) - len(above)} of {len(worst_ratios())} cells",
            f"within {at_most(100 * (max(above) - 1), 1)}% in {len(above)}",
            f"{held()} of the 90% intervals",
        ],
        "| prediction off over a plain loop": [
            f"{cores['prediction off']['ratio']:.3f} on two cores ({result('overhead')['parameters'] / 1e6:.1f}M GPT)",
            f"{span((rows['prediction off']['ratio'] for rows in (few, many)), '.3f')} on an H200 "
            f"({result('overhead_h200_batch8')['parameters'] / 1e6:.1f}M GPT)",
        ],
        "| Full-phase bookkeeping": [
            f"{cores['Full bookkeeping']['ratio']:.3f} on two cores",
            f"{many['Full bookkeeping']['ratio']:.3f} at 64k tokens a step, "
            f"{few['Full bookkeeping']['ratio']:.3f} at 4k on an H200",
        ],
        "| `hybridtrainer --help`": [f"{result('startup')['median_seconds']['hybridtrainer --help']:.2f} s"],
    }
