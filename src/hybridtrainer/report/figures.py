"""What a page is made of: sections, figures, tables, legends. Plain data between those who know and those who draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup

from hybridtrainer.report.downsample import Point, spread
from hybridtrainer.report.values import count, plain, show

MOST_TABLE_ROWS = 100


@dataclass(frozen=True)
class Table:
    """A table; `texts` columns are aligned left, all others right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: frozenset[int] = frozenset({0})
    caption: str = ""
    note: str = ""


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a name, and how it is drawn."""

    name: str
    shape: Literal["line", "area", "dot", "square", "triangle", "diamond", "cross", "rule"]
    style: str


@dataclass(frozen=True)
class Figure:
    """A chart with its legend, what has to be said about it, and its values as a table."""

    title: str
    svg: Markup
    legend: Sequence[Key] = ()
    note: str = ""
    table: Table | None = None
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page: what is said first, then pictures, then tables; `folded` ones open on demand."""

    title: str
    texts: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    parts: Sequence[Section] = ()
    folded: Sequence[Table] = ()
    anchor: str = ""


@dataclass(frozen=True)
class Verdict:
    """What a reader should know first: one sentence for each thing reported, and how it should look."""

    name: str
    text: str
    mood: Literal["good", "bad", "neutral"] = "neutral"
    warnings: Sequence[str] = field(default_factory=tuple)


def capped(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    limit: int = MOST_TABLE_ROWS,
    texts: frozenset[int] = frozenset({0}),
    caption: str = "",
    thing: str = "row",
) -> Table:
    """A table of the first `limit` rows, which says how many were left out."""
    left_out = len(rows) - limit
    note = f"The first {count(limit, thing)} are shown, {count(left_out)} are left out." if left_out > 0 else ""
    return Table(columns, [[plain(cell) for cell in row] for row in rows[:limit]], texts, caption, note)


def values_table(
    x_name: str, y_name: str, series: Sequence[tuple[str, Sequence[Point]]], limit: int = MOST_TABLE_ROWS
) -> Table:
    """The values behind a chart, evenly thinned so that all series together have at most about `limit` rows."""
    share = max(4, limit // max(1, len(series)))
    rows: list[tuple[str, str, str]] = []
    for name, points in series:
        known = [(x, y) for x, y in points if y is not None]
        rows += [(plain(name, 80), show(x, 6), show(y, 5)) for x, y in spread(known, share)]
    total = sum(y is not None for _, points in series for _, y in points)
    note = f"{count(len(rows))} of {count(total)} values, evenly spread." if len(rows) < total else ""
    return Table(("series", x_name, y_name), rows, frozenset({0}), "", note)
