"""Settings and environment as rows of names and texts, and the small files of a run folder. Draws nothing."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = dict[str, str]
"""Names with dots, as `--set` takes them, and values as text."""


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """The content of a TOML file, and what was wrong with it; both empty where there is none.

    A report is of use without these files, so that a damaged one is said in it rather than raised.
    """
    return _read(path, tomllib.loads)


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """The same for a JSON file that holds an object."""
    return _read(path, json.loads)


def flat(settings: Mapping[str, Any], prefix: str = "") -> Rows:
    """Nested settings as one level.

    >>> flat({"seed": 0, "optimizer": {"lr": 0.002, "betas": [0.9, 0.95]}})
    {'seed': '0', 'optimizer.lr': '0.002', 'optimizer.betas': '[0.9, 0.95]'}
    """
    rows: Rows = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            rows |= flat(value, f"{prefix}{name}.")
        else:
            rows[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return rows


def side_by_side(columns: Sequence[Rows]) -> dict[str, list[str | None]]:
    """Every name with its value in each column; None where a column has no such name."""
    names = list(dict.fromkeys(name for rows in columns for name in rows))
    return {name: [rows.get(name) for rows in columns] for name in names}


def differing(columns: Sequence[Rows]) -> dict[str, list[str | None]]:
    """Of those, the names whose values are not the same everywhere."""
    return {name: values for name, values in side_by_side(columns).items() if len(set(values)) > 1}


def _read(path: Path, parse: Any) -> tuple[dict[str, Any], str]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"{path.name} cannot be read: {error.strerror}."
    except (ValueError, RecursionError) as error:
        return {}, f"{path.name} is damaged and was left out: {error}"
    if not isinstance(content, dict):
        return {}, f"{path.name} is damaged and was left out: it holds no table of names and values."
    return content, ""
