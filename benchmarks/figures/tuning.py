"""The measured numbers of docs/PREDICTION.md on trained models, and on what gives nothing to foresee."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from benchmarks.figures.values import final, span
from benchmarks.record import RESULTS, result

STUDIES = {
    "tune_shakespeare": "tinyshakespeare, all weights",
    "tune_shakespeare_lora": "tinyshakespeare, LoRA",
    "tune_wikitext": "wikitext-2, all weights",
    "tune_wikitext_lora": "wikitext-2, LoRA",
}
PAIRS = (
    ("auto", "cosine"),
    ("auto", "averaged"),
    ("auto-cosine", "cosine"),
    ("samples", "averaged"),
    ("jumps", "averaged"),
)
NAMES = {
    "auto": "auto, constant",
    "auto-cosine": "auto, cosine",
    "samples": "samples, averaged",
    "jumps": "jumps, averaged",
    "averaged": "averaged read-out, constant",
    "cosine": "cosine",
}


def kept() -> dict[str, str]:
    """The studies of which there is a result."""
    return {study: name for study, name in STUDIES.items() if (RESULTS / f"foresight_{study}.json").exists()}


def tuning_table() -> list[str]:
    """What arms came to against plain ones, in time and in compute, with final losses."""
    rows = []
    for study, name in kept().items():
        found = result(f"foresight_{study}")
        head = f"| {name} | {found['target']['value']:.3f} "
        compared = {(row["arm"], row["baseline"]): row for row in found["comparisons"]}
        for arm, baseline in PAIRS:
            if (arm, baseline) in compared:
                row = compared[arm, baseline]
                losses = f"{final(study, baseline):.3f}, {final(study, arm):.3f}"
                cells = [NAMES[arm], NAMES[baseline], _ratio(row["speedup"]), _ratio(row["compute"]), losses]
                rows.append(f"{head}| {' | '.join(cells)} |")
                head = "| | "
    return rows


def _ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return "never"
    return f"{found['mean']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def resist_table() -> list[str]:
    """Time over plain's, with its range over the seeds, and losses, on tasks that give nothing to foresee."""
    rows = []
    for task, found in result("resist")["tasks"].items():
        cells = []
        for arm in ("auto", "jumps"):
            ratios = [seed[arm]["processor_seconds"] / seed["plain"]["processor_seconds"] for seed in found["seeds"]]
            cells.append(f"{median(ratios):.3f} ({span(ratios, '.3f')})")
        step = 1000 * fmean(seed["plain"]["processor_seconds"] for seed in found["seeds"]) / found["steps"]
        losses = ", ".join(f"{found[arm]['loss']:.3f}" for arm in ("plain", "auto", "jumps"))
        rows.append(f"| {task} | {step:.0f} | {' | '.join(cells)} | {losses} |")
    return rows


def jumps_kept_where_images_stay_hard() -> str:
    """By jumps that were named, over the seeds."""
    found = result("resist")["tasks"]["images that stay hard"]
    kept = [seed["jumps"]["jumps"][0] for seed in found["seeds"]]
    return f"{span(kept, 'd')} jumps were kept in {found['steps']} steps"
