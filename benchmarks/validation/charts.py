"""Draws what the validation has measured: memory and speed by size, memory against quality, losses.

python -m benchmarks.validation.charts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from benchmarks.record import gib, result
from benchmarks.stream_chart import STYLE
from benchmarks.validation.results import (
    LATE,
    everything,
    group,
    reserved,
    training_loss,
)

DOCS = Path(__file__).parents[2] / "docs"
WIDTH = 640
LETTER_WIDTH, LETTER_HEIGHT = 7.5, 14
COLOURS = ("#2f6fdb", "#8c959f", "#bf5700", "#1a7f37", "#8250df")
LINE_STYLE = "".join(f".l{n}{{fill:none;stroke:{c};stroke-width:2}}.p{n}{{fill:{c}}}" for n, c in enumerate(COLOURS))


class Size(NamedTuple):
    """One bar of the chart by size."""

    name: str
    card: str
    parameters: int
    reserved_gib: float
    speed: str


def sizes() -> list[Size]:
    """From 124M to 50B, each on the smallest card on which it was trained."""
    streamed = result("stream")["rows"]
    chosen = (
        ("124M", "124m-1gb-8k", "2 GB"),
        ("350M", "350m-2gb-16k", "4 GB"),
        ("1.5B", "1.5b-4gb-8k", "4 GB"),
        ("7B", "7b-8gb-16k", "8 GB"),
        ("50B", "50b-16gb-4k", "16 GB"),
    )
    return [
        Size(
            name,
            card,
            streamed[key]["parameters"],
            gib(streamed[key]["reserved_peak_bytes"]),
            f"{streamed[key]['tokens_per_second']:,.0f} tok/s",
        )
        for name, key, card in chosen
    ]


def by_size(found: Sequence[Size]) -> str:
    """Reserved memory as bars on a logarithmic axis, beside what plain AdamW takes for its states alone."""
    top, bottom, left, right = 84, 318, 64, 20
    low, high = 0.5, 1024.0
    unit = (bottom - top) / math.log2(high / low)

    def height(value: float) -> float:
        return unit * math.log2(value / low)

    parts = [
        '<text class="name" x="10" y="18">GPU memory to train all parameters, GiB (logarithmic)</text>',
        '<rect class="ours" x="10" y="30" width="12" height="12"/>'
        '<text x="28" y="41">HybridTrainer, streamed: measured, reserved by torch</text>',
        '<rect class="bound" x="10" y="48" width="12" height="12"/>'
        '<text x="28" y="59">plain AdamW in fp32, without activations: 16 bytes a parameter</text>',
    ]
    for power in range(0, 11, 2):
        y = bottom - height(float(1 << power))
        parts.append(f'<line class="axis" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{1 << power}</text>')
    step = (WIDTH - left - right) / len(found)
    for number, each in enumerate(found):
        x, width, middle = left + step * (number + 0.2), step * 0.6, left + step * (number + 0.5)
        ours, plain = height(each.reserved_gib), height(gib(16 * each.parameters))
        parts += [
            f'<rect class="ours" x="{x:.1f}" y="{bottom - ours:.1f}" width="{width:.1f}" height="{ours:.1f}"/>',
            f'<rect class="bound" x="{x:.1f}" y="{bottom - plain:.1f}" width="{width:.1f}" height="{plain:.1f}"/>',
            f'<text x="{middle:.1f}" y="{bottom - plain - 6:.1f}" text-anchor="middle">'
            f"{gib(16 * each.parameters):.3g}</text>",
            f'<text class="light" x="{middle:.1f}" y="{bottom - ours + 16:.1f}" text-anchor="middle">'
            f"{each.reserved_gib:.1f}</text>",
            f'<text class="name" x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">'
            f"{each.name}, {each.card}</text>",
            f'<text x="{middle:.1f}" y="{bottom + 35}" text-anchor="middle">{each.speed}</text>',
        ]
    return _svg(364, "GPU memory and speed by size of the model", parts)


def quality() -> str:
    """Memory against the late training loss of the 124M."""
    rows = {"bf16": group("124m")["124m plain"]} | group("124m_options")
    points = {name.removeprefix("124m "): (reserved(row), training_loss(row, *LATE)) for name, row in rows.items()}
    x, y = _scale(0, 5, 64, WIDTH - 30), _scale(5.02, 5.1, 280, 50)
    told = f"GPT-2 124M: training loss of steps {LATE[0] + 1} to {LATE[1]:,} by reserved memory"
    parts = [f'<text class="name" x="10" y="18">{told}</text>']
    parts += _axes(x, y, [0, 1, 2, 3, 4, 5], [5.02, 5.04, 5.06, 5.08, 5.1], 280, "GiB reserved")
    taken = [(x(memory) - 6, y(loss), 12.0) for memory, loss in points.values()]  # left end, middle, width
    for names, (memory, loss) in _named_together(points, x, y):
        name = ", ".join(names)
        across, down, width = x(memory), y(loss), LETTER_WIDTH * len(name)
        around = ((9, 0), (-width - 9, 0), *((-width / 2, dy) for dy in (-16, 18, -20, 22, -26, 28, -36, 38, -46, 48)))
        left, middle = next(
            (across + dx, down + dy)
            for dx, dy in around
            if all(
                abs(down + dy - other) >= LETTER_HEIGHT or across + dx > begin + wide or begin > across + dx + width
                for begin, other, wide in taken
            )
        )
        taken.append((left, middle, width))
        parts.append(f'<text x="{left:.1f}" y="{middle + 4:.1f}">{escape(name)}</text>')
    for name, (memory, loss) in points.items():
        colour = 1 if name == "bf16" else 0
        parts.append(f'<circle class="p{colour}" cx="{x(memory):.1f}" cy="{y(loss):.1f}" r="5"/>')
    return _svg(330, "Memory against quality", parts)


def _named_together(
    points: dict[str, tuple[float, float]], x: Callable[[float], float], y: Callable[[float], float]
) -> list[tuple[list[str], tuple[float, float]]]:
    """Points that would hide each other's names share one, at the place of the first."""
    found: list[tuple[list[str], tuple[float, float]]] = []
    for name, (memory, loss) in points.items():
        near = (
            names
            for names, at in found
            if abs(x(at[0]) - x(memory)) < LETTER_HEIGHT and abs(y(at[1]) - y(loss)) < LETTER_HEIGHT
        )
        names = next(near, None)
        if names is None:
            found.append(([name], (memory, loss)))
        else:
            names.append(name)
    return found


def losses() -> str:
    """Validation loss of the 124M over time, and training losses of the 7B and the 50B."""
    pair = group("124m")
    curves = {
        "124M, cosine, plain": [(each["seconds"], each["loss"]) for each in pair["124m cosine"]["evaluations"]],
        "124M, cosine, auto": [(each["seconds"], each["loss"]) for each in pair["124m auto"]["evaluations"]],
    }
    longest = 10 * math.ceil(max(seconds for curve in curves.values() for seconds, _ in curve) / 10)
    x, y = _scale(0, longest, 50, 410), _scale(5.4, 6.8, 280, 60)
    parts = ['<text class="name" x="10" y="18">Validation loss over seconds of training</text>']
    parts += _axes(x, y, range(0, longest + 1, 10), [5.4, 5.8, 6.2, 6.6], 280, "seconds", right=410)
    parts += _lines(curves, x, y, 56, 34)
    big = {
        "7B, 8 GB": [(step, loss) for step, loss in everything()["7b 8 GB"]["curve"]],
        "50B, 16 GB": [(step, loss) for step, loss in everything()["50b 16 GB"]["curve"]],
    }
    x, y = _scale(0, 50, 470, WIDTH - 12), _scale(6, 15, 280, 60)
    parts.append('<text class="name" x="440" y="18">Training loss over steps</text>')
    parts += _axes(x, y, [0, 25, 50], [6, 9, 12, 15], 280, "steps", left=470, right=WIDTH - 12)
    parts += _lines(big, x, y, 474, 34, first=2)
    return _svg(330, "Losses of the validation's runs", parts)


PICTURES: dict[str, Callable[[], str]] = {
    "sizes.svg": lambda: by_size(sizes()),
    "quality.svg": quality,
    "validation.svg": losses,
}


def _scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    return lambda value: begin + (value - low) * (end - begin) / (high - low)


def _axes(
    x: Callable[[float], float], y: Callable[[float], float], xs: Sequence[float], ys: Sequence[float], bottom: float,
    label: str, left: float | None = None, right: float = WIDTH - 30,
) -> list[str]:  # fmt: skip
    begin = x(xs[0]) if left is None else left
    parts = [f'<line class="axis" x1="{begin}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>' for value in ys]
    parts += [f'<text x="{begin - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>' for value in ys]
    parts += [f'<text x="{x(value):.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>' for value in xs]
    return [*parts, f'<text x="{(begin + right) / 2}" y="{bottom + 38}" text-anchor="middle">{label}</text>']


def _lines(
    curves: dict[str, list[tuple[float, float]]], x: Callable[[float], float], y: Callable[[float], float],
    left: float, top: float, first: int = 0,
) -> list[str]:  # fmt: skip
    parts = []
    for number, (name, points) in enumerate(curves.items()):
        colour = {0: 1, 1: 0}.get(number + first, number + first)
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        parts.append(f'<polyline class="l{colour}" points="{path}"><title>{escape(name)}</title></polyline>')
        row = top + 16 * number
        parts.append(f'<line class="l{colour}" x1="{left}" x2="{left + 18}" y1="{row}" y2="{row}"/>')
        parts.append(f'<text x="{left + 24}" y="{row + 4}">{escape(name)}</text>')
    return parts


def _svg(height: int, told: str, parts: Sequence[str]) -> str:
    more = f"{LINE_STYLE}.light{{fill:#fff}}.band{{fill:#2f6fdb;opacity:0.1}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"><title>{told}</title>'
        f"<style>{STYLE}{more}</style>{''.join(parts)}</svg>\n"
    )


def main() -> None:
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw())
        print(f"written to {name}")


if __name__ == "__main__":
    main()
