"""Writes the tables of measured figures into README and docs, each between two comments that name it.

python -m benchmarks.validation.tables
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

from benchmarks.record import gib, result
from benchmarks.validation.cells import change, fall, table
from benchmarks.validation.promises import promises
from benchmarks.validation.results import (
    LATE,
    Measured,
    against_plain,
    by_seed,
    differences,
    everything,
    group,
    plan_error,
    reserved,
    training_loss,
)

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_PLACE = re.compile(r"(<!-- table: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.S)
_MODE_BYTES = {"fp32": 12, "split8": 6, "sr8": 4, "sr4": 3, "factored": 2}
_NAMES = {"gpt2-124m": "124M", "gpt2-1.5b": "1.5B", "llama-7b": "7B", "llama-50b": "50B"}


def runs_124m() -> str:
    """Plain and hybrid, 124M."""
    return _runs(group("124m"))


def seeds() -> str:
    """Jumps of the 124M over seeds, each beside the plain run of its seed."""
    lines = []
    for name in ("124m plain", "124m conservative", "124m aggressive", "124m all"):
        rows, worse = by_seed(name), differences(name)
        lines.append(
            (
                name,
                ", ".join(f"{row['perplexity']:,.1f}" for row in rows),
                ", ".join(change(each) for each in worse),
                change(fmean(worse)) if worse else "",
                ", ".join(_kept(row) for row in rows) if worse else "",
                ", ".join(str(row["statistics"]["foreseen_steps"]) for row in rows) if worse else "",
            )
        )
    told = ", ".join(str(row["settings"]["seed"]) for row in by_seed("124m plain"))
    return table(
        ("run", f"perplexity, seeds {told}", "against plain", "mean", "jumps kept", "steps foreseen"),
        lines,
    )


def runs_options() -> str:
    """Memory options of the 124M."""
    return _runs(group("124m_options"))


def runs_350m() -> str:
    """The 350M."""
    return _runs(group("350m"))


def runs_billions() -> str:
    """From 1B on."""
    return _runs(
        group("1.5b")
        | group("1b_long")
        | {name: row for size in ("7b", "50b") for name, row in sorted(group(size).items(), key=_by_card)}
    )


def _by_card(row: tuple[str, Measured]) -> int:
    return int(row[0].split()[1])


def sixteen() -> str:
    """Rows of a 16 GB card."""
    return _runs({name: row for name, row in everything().items() if "16 GB" in name})


def quality() -> str:
    """Memory against quality, 124M: every option after 1,000 steps."""
    rows = {"bf16": group("124m")["124m plain"]} | group("124m_options")
    plain = training_loss(rows["bf16"], *LATE)
    lines = [
        (
            name.removeprefix("124m "),
            f"{reserved(row):.2f}",
            f"{training_loss(row, *LATE):.4f}",
            f"{training_loss(row, *LATE) / plain - 1:+.2%}",
        )
        for name, row in sorted(rows.items(), key=lambda each: -each[1]["reserved_peak_bytes"])
    ]
    return table(
        ("option", "reserved GiB", f"training loss, steps {LATE[0] + 1} to {LATE[1]:,}", "against bf16 alone"), lines
    )


def worked_bytes() -> str:
    """What states take by mode: bytes per parameter times parameters."""
    counts = {
        name: everything()[row]["parameters"]
        for name, row in (("1.5B", "1.5b 4 GB"), ("7B", "7b 8 GB"), ("50B", "50b 16 GB"))
    }
    lines = [
        ("plain AdamW, all on the GPU in fp32 (weights 4, gradients 4, moments 8)", "16", *_sizes(counts.values(), 16)),
        ("resident, 8-bit moments (weights 4, gradients 4, moments 2)", "10", *_sizes(counts.values(), 10)),
    ]
    lines += [
        (f"`{mode}`, in host memory", str(taken), *_sizes(counts.values(), taken))
        for mode, taken in _MODE_BYTES.items()
    ]
    return table(("what", "bytes per parameter", *(f"{name}, GB" for name in counts)), lines)


def speeds() -> str:
    """Models that do not fit, by card: what they take and how fast they are, each alone on its machine."""
    streamed = result("stream")["rows"]
    chosen = (
        ("1.5b-4gb-8k", "4 GB", "1.5b 4 GB"),
        ("7b-8gb-16k", "8 GB", "7b 8 GB"),
        ("7b-16gb-16k", "16 GB", "7b 16 GB"),
        ("50b-16gb-4k", "16 GB", "50b 16 GB"),
    )
    lines = []
    for key, card, trained in chosen:
        row = streamed[key]
        lines.append(
            (
                _NAMES[row["case"]["model"]],
                card,
                f"{gib(row['reserved_peak_bytes']):.2f} GiB",
                f"{row['host_bytes'] / 1e9:.0f} GB",
                f"{row['case']['tokens']:,}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['share_of_compute']:.0%}",
                fall(everything()[trained]),
            )
        )
    return table(
        (
            "model",
            "card",
            "GPU, reserved",
            "host RAM",
            "tokens a step",
            "tok/s",
            "of no copies at all",
            "a run on wikitext-2",
        ),
        lines,
    )


def peers() -> str:
    """Half of the 7B, beside what people use otherwise."""
    rows = result("stream_peers")["rows"] | result("stream_peers_4k")["rows"] | result("stream_peers_zero3")["rows"]
    names = {
        "streamed": "HybridTrainer, streamed", "resident": "torch, resident", "fsdp2-offload": "FSDP2, CPU offload",
        "zero3-offload": "DeepSpeed ZeRO-3, CPU offload",
    }  # fmt: skip
    lines = []
    for way, told in names.items():
        found = [rows.get(f"{way}, {tokens}") for tokens in (16384, 4096)]
        cells = [
            f"{row['tokens_per_second']:,.0f} | {gib(row['reserved_peak_bytes']):.1f}" if row else " | "
            for row in found
        ]
        lines.append((told, *(part.strip() for cell in cells for part in cell.split("|"))))
    return table(("way", "tok/s at 16k", "GiB", "tok/s at 4k", "GiB"), lines)


TABLES: dict[str, Callable[[], str]] = {
    "promises": promises,
    "runs-small": runs_124m,
    "seeds": seeds,
    "runs-options": runs_options,
    "runs-medium": runs_350m,
    "runs-billions": runs_billions,
    "sixteen": sixteen,
    "quality": quality,
    "worked-bytes": worked_bytes,
    "speeds": speeds,
    "peers": peers,
}


def rewritten(page: str) -> str:
    """A page with every table made anew."""
    return _PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[4]}", page)


def _runs(rows: dict[str, Measured]) -> str:
    lines = []
    for name, row in rows.items():
        worse = against_plain(name, row)
        others = row["at_once"] - 1
        beside = f" ({others} other{'s' if others > 1 else ''})" if others else ""
        predict = f"{gib(row['jump_bytes']):.2f}" if row["jump_bytes"] else ""
        lines.append(
            (
                name,
                _settings(row),
                f"{row['tokens_per_step']:,}",
                f"{row['settings']['train']['steps']:,}",
                f"{row['first_loss']:.2f} to {row['last_loss']:.2f}",
                f"{row['perplexity']:,.1f}" + (f" ({worse:+.1%})" if worse is not None else ""),
                f"{reserved(row):.2f}",
                f"{gib(row['plan']['gpu_bytes']):.2f} ({plan_error(row):+.1%})",
                predict,
                _kept(row),
                f"{1000 * row['seconds_per_step']:,.0f} ms{beside}",
            )
        )
    return table(
        (
            "run", "settings", "tokens a step", "steps", "loss", "perplexity", "reserved GiB", "planned",
            "a jump, GiB", "jumps kept", "a step",
        ),
        lines,
    )  # fmt: skip


def _kept(row: Measured) -> str:
    """Jumps kept of those that were tried; nothing where there were none."""
    jumps = row["jumps"]
    tried = sum(jumps.get(each, 0) for each in ("accepted", "refused"))
    return f"{jumps.get('kept', 0)} of {tried}" if jumps else ""


def _settings(row: Measured) -> str:
    """What the memory settings were, in short; those that the planner chose are marked in the text."""
    memory = {key: value for key, value in row["memory_settings"].items() if key not in ("vram", "ram")}
    told = [f"{key} {value}" if not isinstance(value, bool) else key for key, value in memory.items()]
    accumulate = row["settings"]["train"].get("accumulate", 1)
    return ", ".join(told + ([f"accumulate {accumulate}"] if accumulate > 1 else [])) or "fp32"


def _sizes(counts: Iterable[int], taken: int) -> list[str]:
    return [f"{count * taken / 1e9:,.0f}" for count in counts]


def main() -> None:
    for page in PAGES:
        before = page.read_text()
        after = rewritten(before)
        if after != before:
            page.write_text(after)
            print(f"{page.name}: {', '.join(found[1] for found in _PLACE.findall(after))}")


if __name__ == "__main__":
    main()
