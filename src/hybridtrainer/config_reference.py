"""Every setting explained: what a new configuration file and the reference page have in common, and that page.

What is said of a setting is its own description, its limits are what `config.py` checks. Neither files nor commands
are known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from hybridtrainer.config import PRESETS, RunConfig

_TRAINER_SECTIONS = ("depth", "memory")
_WORDS = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`", "string": "text"}
_COUNTS = {2: "two", 3: "three"}
_OF_64_BITS = 2**63  # such a limit goes without saying


@dataclass(frozen=True)
class Setting:
    """One key of a configuration.

    Attributes:
        name: The key in its section.
        meaning: Its explanation.
        value: Its value as a file would have it; None where a file would leave it out.
        kind: What values it takes.
    """

    name: str
    meaning: str
    value: Any
    kind: str


def sections(config: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], BaseModel]]:
    """A configuration and every section inside it with its path, the outer ones first."""
    yield path, config
    for name in type(config).model_fields:
        inner = getattr(config, name)
        if isinstance(inner, BaseModel):
            yield from sections(inner, (*path, name))


def settings_of(section: BaseModel) -> Iterator[Setting]:
    """The keys of a section, without those of the sections inside it."""
    values = section.model_dump(mode="json")
    schema = type(section).model_json_schema()["properties"]
    for name, field in type(section).model_fields.items():
        if not isinstance(getattr(section, name), BaseModel):
            yield Setting(name, field.description or "", values[name], _kind(schema[name]))


def settings_page() -> str:
    """The settings and presets as Markdown, without a title.

    >>> "| `keep_last` | whole number, 1 or more | `3` | checkpoints kept |" in settings_page()
    True
    """
    parts = []
    for path, section in sections(RunConfig()):
        heading, text = _introduction(path, section)
        rows = [
            f"| `{each.name}` | {each.kind} | {_shown(each.value)} | {each.meaning} |" for each in settings_of(section)
        ]
        parts.append("\n".join([f"## {heading}", "", text, "", _header("key", "values", "default", "meaning"), *rows]))
    return "\n\n".join([*parts, _presets()])


def _introduction(path: tuple[str, ...], section: BaseModel) -> tuple[str, str]:
    if not path:
        return "Phases and forecasts", (
            "At the top of a file, before any section; in Python arguments of `HybridTrainerConfig`. "
            "What they do is in [PREDICTION.md](PREDICTION.md#what-happens-in-a-run)."
        )
    name = ".".join(path)
    about = " ".join((type(section).__doc__ or "").split("\n\n", maxsplit=1)[0].split())
    python = f" In Python `{name}={type(section).__name__}(...)`." if name in _TRAINER_SECTIONS else ""
    return name, f"`[{name}]`: {about[:1].lower()}{about[1:]}{python}"


def _presets() -> str:
    keys = sorted({key for preset in PRESETS.values() for key in preset})
    plain = RunConfig().model_dump(mode="json")
    rows = [
        " | ".join([f"| `{key}`", *(_shown(preset.get(key, plain[key])) for preset in PRESETS.values())]) + " |"
        for key in keys
    ]
    python = " and ".join(f"`HybridTrainerConfig.{name}()`" for name in PRESETS if name != "default")
    text = (
        f'`preset = "conservative"` in a file takes its values where the file has none of its own; in Python {python}.'
    )
    return "\n".join(["## Presets", "", text, "", _header("key", *PRESETS), *rows])


def _header(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}"


def _shown(value: Any) -> str:
    return "left out" if value is None else f"`{json.dumps(value)}`"


def _kind(schema: dict[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    if "anyOf" in schema:
        return ", or ".join(_kind(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return ", ".join(_shown(each) for each in schema["enum"])
    if "prefixItems" in schema:
        each = schema["prefixItems"]
        return f"list of {_COUNTS[len(each)]}: {_kind(each[0])}"
    if schema["type"] == "array":
        return f"list of {_kind(schema['items'])}"
    limits = [
        told.format(schema[key])
        for key, told in (
            ("minimum", "{} or more"),
            ("exclusiveMinimum", "above {}"),
            ("maximum", "at most {}"),
            ("exclusiveMaximum", "below {}"),
        )
        if key in schema and schema[key] < _OF_64_BITS
    ]
    return ", ".join([_WORDS[schema["type"]], *limits])
