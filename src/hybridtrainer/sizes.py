"""Amounts as people read them: memory and time in the unit that fits, and numbers of parameters.

The other way round, a size that somebody has typed, is `size_in_bytes` in `config.py`.
"""

from __future__ import annotations

import math

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def as_size(nbytes: float, digits: int = 2) -> str:
    """An amount of memory in GiB, with so many digits, or in a smaller unit where that would be next to nothing.

    >>> as_size(3 << 30), as_size(3 << 30, digits=1), as_size(5 << 20), as_size(700)
    ('3.00 GiB', '3.0 GiB', '5.0 MiB', '0.7 KiB')
    """
    if abs(nbytes) >= GIB / 10 or not nbytes:
        return f"{nbytes / GIB:.{digits}f} GiB"
    return f"{nbytes / MIB:.1f} MiB" if abs(nbytes) >= MIB / 10 else f"{nbytes / KIB:.1f} KiB"


def as_difference(nbytes: float) -> str:
    """So much more or less memory.

    >>> as_difference(3 << 30), as_difference(-5 << 20), as_difference(0)
    ('+3.00 GiB', '-5.0 MiB', 'same')
    """
    return f"{'+' if nbytes > 0 else ''}{as_size(nbytes)}" if nbytes else "same"


def as_seconds(seconds: float) -> str:
    """A short time, in seconds or in milliseconds.

    >>> as_seconds(3.94), as_seconds(0.117), as_seconds(0.0042)
    ('3.94 s', '117 ms', '4.2 ms')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def as_count(number: int) -> str:
    """A number of parameters, in billions, millions or thousands.

    >>> as_count(6_740_000_000), as_count(123_600_000), as_count(27_000), as_count(1)
    ('6.74B', '123.6M', '27.0k', '1')
    """
    for unit, letter, digits in ((1e9, "B", 2), (1e6, "M", 1), (1e3, "k", 1)):
        if number >= unit:
            return f"{number / unit:.{digits}f}{letter}"
    return str(number)


def rounded_down(value: float, digits: int) -> float:
    """The largest number of so many digits that is not above the value: what "at least" may say.

    >>> rounded_down(2.289, 2), rounded_down(2.3, 2)
    (2.28, 2.3)
    """
    return math.floor(round(value * 10.0**digits, 6)) / 10.0**digits
