"""Line charts: series, bands of phases, strips, intervals, markers and rules on one pair of axes.

Lines are drawn in the units of the data under a transform, so that the script that shows values reads them from the
points themselves; nothing is in the page twice. This module knows no run and no comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from hybridtrainer.report.axes import Scale, padded, span, tick_labels, ticks
from hybridtrainer.report.downsample import Point, thin
from hybridtrainer.report.svg import colour, dash, join, marker, short, tag, title
from hybridtrainer.report.values import count, show

WIDTH, LEFT, RIGHT, TOP, PLOT_HEIGHT = 560.0, 72.0, 16.0, 34.0, 250.0
STRIP_HEIGHT, TALL_STRIP, STRIP_GAP, AXIS_HEIGHT = 9.0, 24.0, 4.0, 56.0


@dataclass(frozen=True)
class Series:
    """A line: its name, its points, the index that gives it colour and dashes, and how bold it is."""

    name: str
    points: Sequence[Point]
    style: int
    weight: Literal["line", "thin", "bold"] = "line"


@dataclass(frozen=True)
class Mark:
    """A single value: where it is, what it says, its shape and its class."""

    x: float
    y: float
    text: str
    shape: str
    style: str


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis with the class of its colour; `low` and `high` are shares of the height, from below."""

    begin: float
    end: float
    style: str
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Interval:
    """A shaded area between a low and a high line."""

    name: str
    points: Sequence[tuple[float, float, float]]
    style: str


@dataclass(frozen=True)
class Chart:
    """All that is in one chart.

    Attributes:
        key: A name for it that no other chart of the page has.
        title: What it shows.
        x_label: Name and unit of the x axis.
        y_label: Name and unit of the y axis.
        x_unit: What stands behind an x value where one is shown: "s", or "step" in front of it.
        series: The lines.
        marks: Single values.
        intervals: Shaded areas.
        bands: Phases behind the lines.
        strips: Phases below the plot, one strip with the index of its series for each run.
        rules: Horizontal lines with their text.
        links: Vertical lines between two values at one x, with their class.
        zero: Whether 0 must be on the y axis.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    x_unit: str
    series: Sequence[Series] = ()
    marks: Sequence[Mark] = ()
    intervals: Sequence[Interval] = ()
    bands: Sequence[Band] = ()
    strips: Sequence[tuple[int, Sequence[Band]]] = ()
    rules: Sequence[tuple[float, str]] = ()
    links: Sequence[tuple[float, float, float, str]] = ()
    zero: bool = False


def draw(chart: Chart, points: int = 400) -> tuple[Markup, str]:
    """The chart as SVG with at most about `points` points for each line, and what a reader has to be told of it."""
    x, y, cut_off = _scales(chart)
    tall = STRIP_HEIGHT if len(chart.strips) != 1 else TALL_STRIP
    bottom = TOP + PLOT_HEIGHT + len(chart.strips) * (tall + STRIP_GAP)
    height = bottom + AXIS_HEIGHT
    lines = join(_line(series, points) for series in chart.series)
    plot = tag(
        "svg",
        tag(
            "g",
            join(_area(interval, points) for interval in chart.intervals) + lines,
            transform=f"matrix({x.factor:.9g} 0 0 {y.factor:.9g} {x.offset - LEFT:.9g} {y.offset - TOP:.9g})",
            class_="plot",
        ),
        x=LEFT,
        y=TOP,
        width=WIDTH - LEFT - RIGHT,
        height=PLOT_HEIGHT,
    )
    rules = [
        tag("line", title(text), x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_="rule")
        for value, text in chart.rules
        if y.holds(value)
    ]
    links = [
        tag("line", x1=x(at), x2=x(at), y1=y(one), y2=y(other), class_=f"link {style}")
        for at, one, other, style in chart.links
        if y.holds(one) and y.holds(other)
    ]
    marks = [marker(m.shape, x(m.x), y(m.y), 4, m.text, m.style) for m in chart.marks if x.holds(m.x) and y.holds(m.y)]
    strips = [
        _strip(style, bands, x, TOP + PLOT_HEIGHT + at * (tall + STRIP_GAP) + STRIP_GAP, tall)
        for at, (style, bands) in enumerate(chart.strips)
    ]
    parts = [_bands(chart.bands, x, TOP, PLOT_HEIGHT), _frame(chart, x, y, bottom)]
    parts += [*strips, *rules, *links, plot, *marks]
    note = f"{count(cut_off, 'value')} far outside the others {'is' if cut_off == 1 else 'are'} cut off at the edge."
    return picture(chart.key, chart.title, _told(chart), WIDTH, height, parts, chart.x_unit), note if cut_off else ""


def picture(
    key: str, name: str, told: str, width: float, height: float, parts: Iterable[Markup], x_unit: str = ""
) -> Markup:
    """A whole SVG with its title and description, which can be reached by keyboard."""
    return tag(
        "svg",
        tag("title", name, id=f"{key}-title"),
        tag("desc", told, id=f"{key}-desc"),
        *parts,
        class_="chart",
        viewBox=f"0 0 {short(width)} {short(height)}",
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
        tabindex="0",
        data_x=x_unit or None,
    )


def _scales(chart: Chart) -> tuple[Scale, Scale, int]:
    """Both axes, and how many values lie outside of them."""
    xs = [at for series in chart.series for at, _ in series.points]
    xs += [mark.x for mark in chart.marks] + [at for interval in chart.intervals for at, _, _ in interval.points]
    xs += [band.end for band in chart.bands] + [band.end for _, bands in chart.strips for band in bands]
    ys = [height for series in chart.series for _, height in series.points if height is not None]
    marked = [mark.y for mark in chart.marks]
    fixed = [edge for interval in chart.intervals for _, *edges in interval.points for edge in edges]
    fixed += [value for value, _ in chart.rules] + [end for _, *ends, _ in chart.links for end in ends]
    # Each kind by itself: beside a long line a few single values would all count as outliers.
    ranges = [padded(values) for values in (ys, marked, fixed) if values and max(values) > min(values)]
    ends = [end for both in ranges for end in both] + ys[:1] + marked[:1] + fixed[:1]
    low, high = span(ends) if ranges else padded(ends)
    if chart.zero:
        low, high = min(low, 0.0), max(high, 0.0)
    y = Scale(low, high, TOP + PLOT_HEIGHT, TOP)
    return Scale(*span(xs, from_zero=True), LEFT, WIDTH - RIGHT), y, sum(not y.holds(value) for value in ys + marked)


def _line(series: Series, points: int) -> Markup:
    """A line, broken where there are gaps."""
    pieces: list[list[str]] = [[]]
    for x, y in thin(series.points, points):
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{x:.7g},{y:.5g}")
    drawn = [tag("polyline", points=" ".join(piece if len(piece) > 1 else piece * 2)) for piece in pieces if piece]
    style = f"line {series.weight} {colour(series.style)} {dash(series.style)}"
    return tag("g", title(series.name), *drawn, class_=style) if drawn else Markup("")


def _area(interval: Interval, points: int) -> Markup:
    """The area between the highs, there, and the lows, back."""
    low = thin([(x, y) for x, y, _ in interval.points], points)
    high = thin([(x, y) for x, _, y in interval.points], points)
    ring = " ".join(f"{x:.7g},{y:.5g}" for x, y in [*high, *reversed(low)])
    return tag("polygon", title(interval.name), points=ring, class_=f"area {interval.style}")


def _bands(bands: Sequence[Band], x: Scale, top: float, height: float) -> Markup:
    """One path for each class; a band narrower than a hair line would not be seen, and is drawn as one."""
    paths: dict[str, list[str]] = {}
    for band in bands:
        begin, width = x(band.begin), max(1.0, (band.end - band.begin) * x.factor)
        upper, deep = top + (1 - band.high) * height, (band.high - band.low) * height
        paths.setdefault(band.style, []).append(f"M{begin:.1f} {upper:.4g}h{width:.1f}v{deep:.4g}h-{width:.1f}z")
    return join(
        tag("path", title(style.removeprefix("phase-")), d="".join(path), class_=f"band {style}")
        for style, path in sorted(paths.items(), key=lambda item: item[0] == "phase-predict")  # the narrow ones on top
    )


def _strip(style: int, bands: Sequence[Band], x: Scale, top: float, height: float) -> Markup:
    middle = top + height / 2
    key = tag("line", x1=LEFT - 34, x2=LEFT - 8, y1=middle, y2=middle, class_=f"line {colour(style)} {dash(style)}")
    return tag("g", key, _bands(bands, x, top, height), class_="strip")


def _frame(chart: Chart, x: Scale, y: Scale, bottom: float) -> Markup:
    """Grid, ticks and labels."""
    heights = ticks(y.low, y.high, 7)
    across, floor = WIDTH - LEFT - RIGHT, TOP + PLOT_HEIGHT
    labels = zip(heights, tick_labels(heights), strict=True)
    return join([
        tag("path", d="".join(f"M{LEFT:g} {y(value):.1f}h{across:g}" for value in heights), class_="grid"),
        tag("g", *(tag("text", label, x=LEFT - 8, y=y(value) + 5) for value, label in labels), class_="tick end"),
        tag("path", d=f"M{LEFT:g} {floor:g}h{across:g}", class_="axis"),
        tag("text", chart.y_label, x=2, y=18, class_="label"),
        x_axis(x, chart.x_label, bottom),
    ])  # fmt: skip


def x_axis(x: Scale, label: str, bottom: float) -> Markup:
    """Ticks and label of an x axis whose line is drawn elsewhere."""
    places = ticks(x.low, x.high)
    labels = zip(places, tick_labels(places), strict=True)
    return join([
        tag("path", d="".join(f"M{x(value):.1f} {bottom:g}v5" for value in places), class_="axis"),
        tag("g", *(tag("text", text, x=x(value), y=bottom + 22) for value, text in labels), class_="tick middle"),
        tag("text", label, x=x.end, y=bottom + 46, class_="label end"),
    ])  # fmt: skip


def _told(chart: Chart) -> str:
    """The chart in a sentence, for those who cannot see it."""
    parts = [f"{chart.y_label} over {chart.x_label}."]
    for series in chart.series[:8]:
        known = [y for _, y in series.points if y is not None]
        if known:
            parts.append(f"{series.name}: from {show(known[0])} to {show(known[-1])}, lowest {show(min(known))}.")
    return " ".join(parts)
