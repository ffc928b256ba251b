"""What a page says of settings and environments: first where they differ, then all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridtrainer.report.figures import Section, Table, capped
from hybridtrainer.report.settings import Rows, differing, side_by_side
from hybridtrainer.report.values import NOTHING, plain

MOST_SETTINGS = 200
LONGEST_VALUE = 120


def settings_section(columns: Mapping[str, Rows], title: str = "Settings", things: str = "runs") -> Section:
    """Settings of runs or arms, those that differ in sight, all of them on demand."""
    known = {name: rows for name, rows in columns.items() if rows}
    texts = []
    if missing := [name for name in columns if name not in known]:
        texts.append(f"Not recorded for {', '.join(plain(name, 60) for name in missing)}.")
    if not known:
        return Section(title, texts)
    tables: list[Table] = []
    if len(known) > 1:
        different = differing(list(known.values()))
        if different:
            tables.append(_table(list(known), different, f"In these the {things} differ"))
        else:
            texts.append(f"All {things} have the same.")
    everything = side_by_side(list(known.values()))
    folded = [_table(list(known), everything, f"All entries ({len(everything)})")]
    return Section(title, texts, tables=tables, folded=folded)


def _table(names: Sequence[str], rows: Mapping[str, Sequence[str | None]], caption: str) -> Table:
    cells = [
        [plain(key, LONGEST_VALUE), *(NOTHING if value is None else plain(value, LONGEST_VALUE) for value in values)]
        for key, values in rows.items()
    ]
    header = ["setting", *([plain(name, 60) for name in names] if len(names) > 1 else ["value"])]
    return capped(
        header, cells, limit=MOST_SETTINGS, texts=frozenset(range(len(header))), caption=caption, thing="setting"
    )
