"""How tables and what often stands in them are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def fall(row: dict[str, Any]) -> str:
    """From where to where the loss of a run went."""
    return f"loss {row['first_loss']:.1f} to {row['last_loss']:.1f} in {row['settings']['train']['steps']} steps"


def change(share: float) -> str:
    """A difference in per cent, with its sign; what rounds to nothing has a plus.

    >>> change(0.0149), change(-0.02), change(-1e-6)
    ('+1.5%', '-2.0%', '+0.0%')
    """
    return f"{round(share, 3) + 0.0:+.1%}"
