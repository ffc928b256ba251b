"""SVG elements as safe markup: every text and every attribute is escaped here. Knows no chart.

There are no style attributes anywhere, because the page's security policy forbids them: colours and dashes are
classes, which the style sheet defines for light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

from hybridtrainer.report.values import plain

COLOURS = 7
DASHES = 4


def tag(name: str, *children: Markup | str, **attributes: str | float | None) -> Markup:
    """One element. Underscores in attribute names become dashes, `class_` is class, None leaves an attribute out.

    >>> print(tag("text", "a < b", x=1.50, class_="tick"))
    <text x="1.5" class="tick">a &lt; b</text>
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is not None:
            shown = value if isinstance(value, str) else short(value)
            parts.append(f' {key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    inner = "".join(escape(child) for child in children)
    return Markup("".join(parts) + (f">{inner}</{name}>" if inner else "/>"))


def join(parts: Iterable[Markup]) -> Markup:
    """Elements one after another."""
    return Markup("").join(parts)


def title(text: str) -> Markup:
    """What an element is called: shown by browsers on hover, without any script."""
    return tag("title", plain(text, 200))


def short(value: float) -> str:
    """A coordinate with two decimals at most.

    >>> short(12.0), short(0.126)
    ('12', '0.13')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def colour(index: int) -> str:
    """The class for the colour of the series with this index."""
    return f"s{index % COLOURS}"


def dash(index: int) -> str:
    """The class for its dashes: neighbours differ, and no two of the first 28 series share colour and dashes."""
    return f"d{(index % COLOURS + index // COLOURS) % DASHES}"


def marker(shape: str, x: float, y: float, size: float, text: str, class_: str) -> Markup:
    """A marker with its text; shapes differ so that colour is not needed to tell them apart."""
    s = size
    paths = {
        "dot": f"M{short(x - s)} {short(y)}a{s} {s} 0 1 0 {2 * s} 0a{s} {s} 0 1 0 {-2 * s} 0z",
        "square": f"M{short(x - s)} {short(y - s)}h{2 * s}v{2 * s}h{-2 * s}z",
        "triangle": f"M{short(x)} {short(y - 1.3 * s)}l{1.2 * s} {2.2 * s}h{-2.4 * s}z",
        "diamond": f"M{short(x)} {short(y - s)}l{s} {s}l{-s} {s}l{-s} {-s}z",
        "cross": f"M{short(x - s)} {short(y - s)}l{2 * s} {2 * s}m0 {-2 * s}l{-2 * s} {2 * s}",
    }
    return tag("path", title(text), d=paths[shape], class_=f"p {shape} {class_}")
