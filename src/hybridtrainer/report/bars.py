"""Stacked bars, and the chart of one estimate for each seed (a forest chart). Knows no run and no comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hybridtrainer.report.axes import Scale, span, ticks
from hybridtrainer.report.charts import picture, x_axis
from hybridtrainer.report.svg import marker, tag, title
from hybridtrainer.report.values import plain, show

WIDTH, RIGHT = 560.0, 76.0
ROW_HEIGHT, BAR_HEIGHT, TOP, AXIS_HEIGHT = 34.0, 22.0, 8.0, 56.0
LETTER = 7.6
"""About the width of a letter inside a bar."""

WIDE_LETTER = 10.5
"""The same beside one, on a phone, where labels are larger."""


@dataclass(frozen=True)
class Part:
    """A part of a bar: its name, its size, its class, and its size in words."""

    name: str
    size: float
    style: str
    label: str


@dataclass(frozen=True)
class Words:
    """What a forest chart calls its last row, a row without a value, and an interval's end at 0."""

    overall: str = "mean"
    missing: str = "no value"
    zero: str = "0"


def stacked(key: str, name: str, x_label: str, rows: Sequence[tuple[str, Sequence[Part], str]]) -> Markup:
    """One bar for each row of (name, parts, total in words); a part says its size where there is room for it."""
    longest = max((len(row) for row, _, _ in rows), default=0)
    left = min(172.0, 14.0 + longest * WIDE_LETTER) if len(rows) > 1 else 8.0
    bottom = TOP + len(rows) * ROW_HEIGHT
    x = Scale(*span([sum(part.size for part in parts) for _, parts, _ in rows], from_zero=True), left, WIDTH - RIGHT)
    drawn = [_x_axis(x, x_label, bottom)]
    for at, (row, parts, total) in enumerate(rows):
        top, begin = TOP + at * ROW_HEIGHT, 0.0
        middle = top + BAR_HEIGHT / 2 + 5
        if len(rows) > 1:
            drawn.append(tag("text", _fitting(row), x=left - 8, y=middle, class_="tick end"))
        for part in parts:
            width = part.size * x.factor
            text = f"{row}: {part.name} {part.label}"
            bar = tag("rect", title(text), x=x(begin), y=top, width=max(0.5, width), height=BAR_HEIGHT,
                      class_=f"p bar {part.style}")  # fmt: skip
            drawn.append(bar)
            for label in (part.label, part.label.partition(" (")[0]):
                if width > len(label) * LETTER + 4:
                    drawn.append(tag("text", label, x=x(begin) + width / 2, y=middle, class_="inside middle"))
                    break
            begin += part.size
        drawn.append(tag("text", total, x=x(begin) + 8, y=middle, class_="tick"))
    told = ". ".join(f"{row}: {', '.join(f'{p.name} {p.label}' for p in parts)}" for row, parts, _ in rows[:8])
    return picture(key, name, told, WIDTH, bottom + AXIS_HEIGHT, drawn)


def forest(
    key: str,
    name: str,
    x_label: str,
    rows: Sequence[tuple[str, float | None]],
    mean: tuple[float | None, float | None, float | None],
    style: str,
    neutral: float = 1.0,
    words: Words = Words(),
) -> Markup:
    """One mark for each row, the figure for all with its interval below, a line where nothing is gained or lost."""
    left = 14.0 + min(15, max(len(row) for row in [*(row for row, _ in rows), words.overall])) * WIDE_LETTER
    center, low, high = mean
    known = [value for _, value in rows if value is not None]
    known += [value for value in mean if value is not None] + [neutral]
    begin, end = span(known)
    air = (end - begin) * 0.08
    x = Scale(begin - air, end + air, left, WIDTH - 16)
    bottom = TOP + (len(rows) + 1) * ROW_HEIGHT
    drawn = [
        _x_axis(x, x_label, bottom),
        tag("line", title("no difference"), x1=x(neutral), x2=x(neutral), y1=TOP, y2=bottom, class_="rule"),
    ]
    for at, (row, value) in enumerate(rows):
        y = TOP + (at + 0.5) * ROW_HEIGHT
        drawn.append(tag("text", _fitting(row), x=left - 12, y=y + 5, class_="tick end"))
        if value is None:
            drawn.append(_beside(x, neutral, y, words.missing))
        else:
            drawn.append(marker("square", x(value), y, 4.5, f"{row}: {show(value)}", style))
    y = TOP + (len(rows) + 0.5) * ROW_HEIGHT
    drawn.append(tag("line", x1=2, x2=WIDTH - 16, y1=y - ROW_HEIGHT / 2, y2=y - ROW_HEIGHT / 2, class_="grid"))
    drawn.append(tag("text", words.overall, x=left - 12, y=y + 5, class_="tick end strong"))
    told = f"{words.overall} {show(center)}"
    if low is not None and high is not None:
        told += f", 95% interval {' to '.join(words.zero if end == 0 else show(end) for end in (low, high))}"
        drawn.append(tag("path", d=f"M{x(low):.2f} {y - 6}v12M{x(low):.2f} {y}H{x(high):.2f}M{x(high):.2f} {y - 6}v12",
                         class_=f"whisker {style}"))  # fmt: skip
    if center is not None:
        drawn.append(marker("diamond", x(center), y, 8, told, style))
    else:
        drawn.append(_beside(x, neutral, y, "no value for any seed"))
    return picture(key, name, f"{x_label}: {told}.", WIDTH, bottom + AXIS_HEIGHT, drawn)


def _fitting(name: str) -> str:
    """A name that fits beside a bar; the whole of it is in the bar's own text."""
    shown = plain(name)
    return shown if len(shown) <= 15 else f"{shown[:14]}…"


def _beside(x: Scale, neutral: float, y: float, text: str) -> Markup:
    """A text on the roomier side of the line where nothing is gained or lost."""
    right = x(neutral) < (x.begin + x.end) / 2
    place, side = (x(neutral) + 10, "") if right else (x(neutral) - 10, " end")
    return tag("text", text, x=place, y=y + 5, class_=f"quiet{side}")


def _x_axis(x: Scale, label: str, bottom: float) -> Markup:
    lines = "".join(f"M{x(value):.1f} {TOP:g}V{bottom:g}" for value in ticks(x.low, x.high))
    line = tag("path", d=f"M{x.begin:g} {bottom:g}H{x.end:g}", class_="axis")
    return tag("path", d=lines, class_="grid") + line + x_axis(x, label, bottom)
