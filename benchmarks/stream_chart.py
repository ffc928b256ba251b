"""The sweep over tokens per step as a picture and a table, from what `benchmarks.stream` has measured.

python -m benchmarks.stream_chart
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.stream import newest_rows

SWEEP = ("7b-16gb-2k", "7b-16gb-4k", "7b-16gb-8k", "7b-16gb-16k", "7b-16gb-32k")
PICTURE = Path(__file__).parent.parent / "docs" / "stream.svg"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 60, 240, 52
STYLE = (
    "text{font:13px sans-serif;fill:#57606a}.name{fill:#1f2328;font-weight:bold}.ours{fill:#2f6fdb}"
    ".bound{fill:none;stroke:#8c959f;stroke-width:1.5;stroke-dasharray:4 3}.axis{stroke:#d0d7de}"
    "@media (prefers-color-scheme:dark){text{fill:#9198a1}.name{fill:#f0f6fc}.ours{fill:#6ea8ff}.axis{stroke:#3d444d}}"
)


def sweep() -> dict[str, dict[str, Any]]:
    """The rows, by tokens."""
    found = newest_rows()
    return {name: found[name] for name in SWEEP}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """One line for each number of tokens."""
    lines = [
        "| tokens a step | tok/s | of the same without copies | reserved peak | weights that stay | |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['case']['tokens']:,} | {row['tokens_per_second']:,.0f} | {row['share_of_compute']:.1%} | "
        f"{row['reserved_peak_bytes'] / 2**30:.2f} GiB | {row['kept_weights']} of 32 blocks |"
        f"{' others packed |' if row.get('packed') else ' |'}"
        for row in rows.values()
    ]
    return "\n".join(lines)


def picture(rows: dict[str, dict[str, Any]]) -> str:
    """A bar for each number of tokens, inside the outline of what the same computation does without copies."""
    bounds = [row["case"]["tokens"] / row["seconds_without_copies"] for row in rows.values()]
    unit = (BOTTOM - TOP) / max(bounds)
    step = (WIDTH - LEFT - 20) / len(rows)
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 20}" y1="{BOTTOM}" y2="{BOTTOM}"/>']
    for thousands in range(0, int(max(bounds) // 1000) + 1, 2):
        y = BOTTOM - thousands * 1000 * unit
        parts.append(f'<line class="axis" x1="{LEFT - 4}" x2="{LEFT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{thousands}k</text>')
    for number, (row, bound) in enumerate(zip(rows.values(), bounds, strict=True)):
        x, width = LEFT + step * (number + 0.18), step * 0.64
        height, limit, middle = row["tokens_per_second"] * unit, bound * unit, LEFT + step * (number + 0.5)
        parts += [
            f'<rect class="ours" x="{x:.1f}" y="{BOTTOM - height:.1f}" width="{width:.1f}" height="{height:.1f}"/>',
            f'<rect class="bound" x="{x:.1f}" y="{BOTTOM - limit:.1f}" width="{width:.1f}" height="{limit:.1f}"/>',
            f'<text class="name" x="{middle:.1f}" y="{BOTTOM - limit - 7:.1f}" text-anchor="middle">'
            f"{row['share_of_compute']:.0%}</text>",
            f'<text x="{middle:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{row["case"]["tokens"] // 1024}k</text>',
        ]
    told = "7B streamed through 16 GB: tokens per second by tokens per step; the outline is the same without copies"
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{BOTTOM + 40}" text-anchor="middle">tokens per step</text>')
    parts.append(f'<text class="name" x="{LEFT}" y="16">tokens per second; dashed: the same without copies</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{told}</title>'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    rows = sweep()
    arguments.picture.write_text(picture(rows))
    print(table(rows))
    print(f"\nwritten to {arguments.picture.name}")


if __name__ == "__main__":
    main()
