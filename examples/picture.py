"""Draws a plain and a hybrid run as one SVG: loss over training time, and the phases of the hybrid run as bands.

python examples/picture.py runs/demo-... docs/demo.svg      the first seed of a comparison
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridtrainer.observe.runlog import read_log

WIDTH, HEIGHT = 860, 380
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 44, 74
COLOURS = {"plain": "#777777", "hybrid": "#1667c7"}
BANDS = {"warmup": "#d9d9d9", "full": "#bcd7f5", "predict": "#e8701a", "correct": "#f7cf6d"}
SMOOTH = 0.9

Point = tuple[float, float]


def curve(records: Sequence[dict[str, Any]]) -> list[Point]:
    """(training seconds, smoothed training loss) of every real step."""
    points: list[Point] = []
    seconds = mean = weight = 0.0
    for record in records:
        seconds += record["seconds"]
        if not record["predicted"] and isinstance(record["loss"], float):
            mean, weight = SMOOTH * mean + record["loss"], SMOOTH * weight + 1
            points.append((seconds, mean / weight))
    return points


def bands(records: Sequence[dict[str, Any]], scale: float) -> str:
    """One rectangle for each step of the hybrid run, in the colour of its phase."""
    drawn, seconds = [], 0.0
    for record in records:
        start, seconds = seconds, seconds + record["seconds"]
        x, width = LEFT + start * scale, max(0.4, (seconds - start) * scale)
        colour = BANDS[record["phase"]]
        drawn.append(f'<rect x="{x:.1f}" y="{HEIGHT - BOTTOM + 4}" width="{width:.2f}" height="12" fill="{colour}"/>')
    return "".join(drawn)


def text(x: float, y: float, content: str, anchor: str = "middle", colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{content}</text>'


def draw(runs: dict[str, list[dict[str, Any]]]) -> str:
    """The whole picture."""
    curves = {name: curve(records)[10:] for name, records in runs.items()}
    longest = max(points[-1][0] for points in curves.values())
    losses = [loss for points in curves.values() for _, loss in points]
    low, high = min(losses) - 0.05, max(losses)
    x_scale, y_scale = (WIDTH - LEFT - RIGHT) / longest, (HEIGHT - TOP - BOTTOM) / (high - low)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13" role="img" '
        'aria-label="Training loss over time, plain and hybrid, with the phases of the hybrid run">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for tick in range(int(low * 2) + 1, int(high * 2) + 1):
        y = TOP + (high - tick / 2) * y_scale
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tick / 2:.1f}", "end"))
    for seconds in range(0, int(longest) + 1, 10):
        parts.append(text(LEFT + seconds * x_scale, HEIGHT - BOTTOM + 34, f"{seconds} s"))
    for name, points in curves.items():
        path = " ".join(f"{LEFT + s * x_scale:.1f},{TOP + (high - loss) * y_scale:.1f}" for s, loss in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
    parts.append(bands(runs["hybrid"], x_scale))
    x = float(LEFT)
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="16" width="20" height="4" fill="{colour}"/>{text(x + 26, 23, name, "start")}')
        x += 90
    parts.append(text(WIDTH - RIGHT, 23, "training loss, smoothed, over training time", "end"))
    x = float(LEFT)
    for name, colour in BANDS.items():
        y = HEIGHT - 22
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>{text(x + 18, y + 11, name, "start")}'
        )
        x += 100
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="a comparison with the arms `plain` and `hybrid`, as the demo leaves it"
    )
    parser.add_argument("picture", type=Path, help="the SVG to write")
    arguments = parser.parse_args()
    logs = {name: read_log(arguments.folder / "trials" / f"{name}-seed0" / "log.jsonl") for name in COLOURS}
    steps = {name: [record for record in log if record["kind"] == "step"] for name, log in logs.items()}
    arguments.picture.write_text(draw(steps), encoding="utf-8")
    print(f"Wrote {arguments.picture}")


if __name__ == "__main__":
    main()
