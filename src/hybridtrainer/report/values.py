"""Values from files as numbers and texts that can be shown. Knows no file, no chart and no page.

What a file holds is taken as it is: a number that is not finite, or is no number at all, is a gap, never a crash.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

NOTHING = "–"  # noqa: RUF001
"""Shown where there is no value."""

LONGEST_TEXT = 400


LARGEST = 1e300  # beyond it sums and axes overflow


def number(value: Any) -> float | None:
    """A finite number, or None for everything else: null, "nan", text, true.

    >>> number(2), number("nan"), number(float("inf")), number(True)
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if abs(converted) < LARGEST else None  # NaN is not less than anything


def whole(value: Any) -> int | None:
    """A finite number as an integer, or None."""
    known = number(value)
    return None if known is None else round(known)


def plain(value: Any, longest: int = LONGEST_TEXT) -> str:
    """A text as people can see it: nothing that hides or turns round what stands beside it, and not endless.

    Control and format characters (line ends aside, which become spaces) are replaced, because a direction override
    in a run's name would otherwise rewrite the line it stands in.
    """
    text = " ".join(str(value)[: longest * 4].split())
    shown = "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(char)[0] == "C" else char for char in text)
    if len(shown) <= longest:
        return shown
    return f"{shown[:longest]} … ({len(str(value)) - longest:,} more characters)"


def show(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, never in a form that a reader has to decode.

    >>> show(2.42509), show(0.0), show(123456.0), show(0.895, 4)
    ('2.425', '0', '123,456', '0.8950')
    """
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10**digits:
        return f"{value:,.0f}" if size < 1e12 else f"{value:.3g}"
    if size < 1e-4:
        return f"{value:.2e}"
    decimals = min(digits + 3, max(0, digits - 1 - math.floor(math.log10(size))))
    return f"{value:,.{decimals}f}"


def signed(value: float | None, digits: int = 3) -> str:
    """A difference: its sign is always there."""
    if value is None:
        return NOTHING
    return ("+" if value > 0 else "") + show(value, digits).replace("-", "−")  # noqa: RUF001


def count(amount: int | float | None, thing: str = "") -> str:
    """How many of something.

    >>> count(1, "jump"), count(1200, "step")
    ('1 jump', '1,200 steps')
    """
    if amount is None:
        return NOTHING
    if not thing:
        return f"{amount:,.0f}"
    return f"{amount:,.0f} {thing}{'' if amount == 1 else 's'}"


def worth_in_words(worth: Mapping[str, float]) -> str:
    """What each kind of foresight has saved or cost.

    >>> worth_in_words({"depth": 13.24, "jumps": -0.5})
    'depth saved 13.2 s, jumps cost 0.50 s'
    """
    return ", ".join(f"{name} {'cost' if took < 0 else 'saved'} {seconds(abs(took))}" for name, took in worth.items())


def seconds(value: float | None) -> str:
    """A duration.

    >>> seconds(0.123), seconds(66.16), seconds(4020)
    ('0.12 s', '66.2 s', '1 h 7 min')
    """
    if value is None:
        return NOTHING
    if value < 600:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def time_unit(longest_seconds: float) -> tuple[str, float]:
    """The unit for an axis of time, and how many seconds it has."""
    if longest_seconds < 600:
        return "s", 1.0
    return ("min", 60.0) if longest_seconds < 4 * 3600 else ("h", 3600.0)


def byte_unit(most_bytes: float) -> tuple[str, float]:
    """The unit for an axis of memory, and how many bytes it has."""
    return ("GiB", 2.0**30) if most_bytes >= 2**30 else ("MiB", 2.0**20)


def memory(value: float | None) -> str:
    """An amount of memory."""
    if value is None:
        return NOTHING
    unit, size = byte_unit(value)
    return f"{show(value / size, 3)} {unit}"


def listed(parts: Iterable[str]) -> str:
    """Parts as people list them.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    known = list(parts)
    return known[0] if len(known) == 1 else f"{', '.join(known[:-1])} and {known[-1]}" if known else ""
