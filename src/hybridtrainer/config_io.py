"""Configurations in and out of files: TOML and JSON in, TOML out, overrides, every mistake at once.

`config.py` says what is valid; this module only finds out what a user wrote, and says so in their words.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hybridtrainer import disk
from hybridtrainer.config import PRESETS, RunConfig
from hybridtrainer.config_conflicts import conflicts
from hybridtrainer.config_problems import closest, problems_of, shorten
from hybridtrainer.config_reference import sections, settings_of
from hybridtrainer.errors import ConfigError, Problem, RunFolderError
from hybridtrainer.named_tasks import NAMED_TASKS

Settings = dict[str, Any]

LEFT_TO_PLAN = "# What is left out here is planned where `vram` is given; without it these are the defaults."


def require_free(path: Path, force: bool = False) -> None:
    """Refuses the name of a new file that is taken.

    Raises:
        RunFolderError: if there is something already and `force` is not given.
    """
    try:
        is_taken = not force and path.exists()
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be written: {error}.", "Name another file.") from error
    if is_taken:
        raise RunFolderError(f"{path} is there already.", "Use --force to overwrite it, or name another.")


def write_config(path: Path, text: str, force: bool = False) -> str:
    """Writes a new configuration file, whole or not at all; returns what to do with it.

    Raises:
        RunFolderError: if the file is there already and `force` is not given, or cannot be written.
    """
    require_free(path, force)
    try:
        disk.replace_file(path, text)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from error
    return f"Wrote {path}. Train with: hybridtrainer train {path}"


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run's configuration from a TOML or JSON file and applies `section.key=value` overrides.

    Instead of a file it may be one of the named tasks, see `named_tasks.py`.

    Raises:
        ConfigError: with every mistake in the file and in the overrides.
    """
    source = str(path) if path is not None else "the command line"
    settings: Settings = {} if path is None else _read(Path(path))
    problems = [problem for text in overrides if (problem := _apply_override(settings, text)) is not None]
    return _resolve(settings, source, problems)


def parse_config(settings: Mapping[str, Any], source: str = "the configuration") -> RunConfig:
    """Validates settings that are already in memory, for example from a run folder."""
    return _resolve(dict(settings), source, [])


def to_toml(config: BaseModel) -> str:
    """The whole configuration as TOML; reading it again gives an equal one.

    Where memory is yet to be planned, what is left out stays left out.
    """
    settings = config.model_dump(mode="json")
    memory = getattr(config, "memory", None)
    if memory is not None and memory.mode == "auto":
        settings["memory"] = {
            key: settings["memory"][key] for key in settings["memory"] if key in memory.model_fields_set
        }
    return tomli_w.dumps(_without_none(settings))


def commented_toml(preset: str = "default", task: str | None = None) -> str:
    """A configuration file with every key, each explained in a comment.

    Args:
        preset: Which preset the values come from.
        task: A named task whose settings replace the defaults; one that needs data gets a path to be edited.

    Raises:
        ConfigError: if there is no such preset or task.
    """
    settings: Settings = {}
    head = ["# HybridTrainer configuration. Every key is optional; these are the defaults.", ""]
    if task is not None:
        if task not in NAMED_TASKS:
            message = f"is not one of {', '.join(NAMED_TASKS)}."
            raise ConfigError("the command line", [Problem("task", message, closest(task, NAMED_TASKS))])
        settings = deepcopy(NAMED_TASKS[task].settings)
        head = [f"# {task}: {NAMED_TASKS[task].about}.", ""]
        if settings["data"].get("source") in ("idx", "text"):
            settings["data"]["path"] = "path/to/your/data"
    config = parse_config(settings if preset == "default" else settings | {"preset": preset})
    return "\n".join(head + _commented(config))


def _commented(config: BaseModel) -> list[str]:
    lines: list[str] = []
    for path, section in sections(config):
        lines += ["", f"[{'.'.join(path)}]"] if path else []
        lines += [LEFT_TO_PLAN] if path == ("memory",) else []
        for each in settings_of(section):
            lines.append(f"# {each.meaning}")
            line = f"{each.name} =" if each.value is None else tomli_w.dumps({each.name: each.value}).strip()
            lines.append(f"# {line}" if each.value is None or path == ("memory",) else line)  # what is set stays set
    return lines


def _read(path: Path) -> Settings:
    if str(path) in NAMED_TASKS and not path.exists():
        return deepcopy(NAMED_TASKS[str(path)].settings)
    try:
        text = disk.read_small(path)
    except OSError as error:
        names = None if path.suffix else f"Tasks by name: {', '.join(NAMED_TASKS)}."
        hint = closest(str(path), NAMED_TASKS) or names
        remedy = "Name a file that is there; `hybridtrainer init` writes one."
        raise ConfigError(str(path), [Problem("file", f"cannot be read: {error.strerror}.", hint)], remedy) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [Problem("file", "is not UTF-8 text.")]) from error
    try:
        settings = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), [Problem("file", f"cannot be parsed: {error}.")]) from error
    if not isinstance(settings, dict):
        raise ConfigError(str(path), [Problem("file", "must hold a table of keys and values.")])
    return settings


def _apply_override(settings: Settings, text: str) -> Problem | None:
    key, equals, raw = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        return Problem(text, "is not of the form section.key=value.")
    try:
        parsed = tomllib.loads(f"value = {raw.strip()}")
    except (ValueError, RecursionError):
        parsed = {}
    # What is not one TOML value is a string: --set optimizer.name=sgd
    value = parsed["value"] if len(parsed) == 1 else raw.strip()
    table = settings
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            return Problem(key.strip(), f"{part} is a value, not a section.")
        table = inner
    table[parts[-1]] = value
    return None


def _resolve(settings: Settings, source: str, problems: list[Problem]) -> RunConfig:
    settings = dict(settings)
    preset = settings.pop("preset", "default")
    if not isinstance(preset, str) or preset not in PRESETS:
        problems.append(
            Problem("preset", f"is {shorten(preset)}, not one of {', '.join(PRESETS)}.", closest(str(preset), PRESETS))
        )
        preset = "default"
    settings = PRESETS[preset] | settings
    config, mistakes = _validate(settings)
    if mistakes:
        # Judge the rest with the mistakes taken out, so that conflicts show in the same run.
        broken = [error["loc"] for error in mistakes]
        config, _ = _validate(_without(settings, broken))
    known = {problem.key for problem in problems}
    problems += [problem for problem in problems_of(mistakes, RunConfig) if problem.key not in known]
    if config is not None:
        named = [problem.key for problem in problems]
        problems += [new for new in conflicts(config) if not any(_mentions(new, key) for key in named)]
    if problems or config is None:
        raise ConfigError(source, problems)
    return config


def _validate(settings: Settings) -> tuple[RunConfig | None, list[ErrorDetails]]:
    try:
        return RunConfig.model_validate(settings), []
    except ValidationError as error:
        return None, error.errors()


def _without(settings: Settings, paths: Sequence[tuple[int | str, ...]]) -> Settings:
    kept = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    for path in paths:
        _drop(kept, path)
    return kept


def _without_none(table: Settings) -> Settings:
    """The table without empty values, which TOML cannot write."""
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }


def _mentions(problem: Problem, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", f"{problem.key} {problem.message}") is not None


def _drop(table: Any, path: Sequence[int | str]) -> None:
    """Removes the innermost setting that `path` leads to; the rest of a path may be inside a value."""
    key, *rest = path
    if not isinstance(table, dict) or key not in table:
        return
    if rest and isinstance(table[key], dict):
        _drop(table[key], rest)
    else:
        del table[key]
