"""Mistakes in settings as people are told of them: every one, by its key, with what might be meant.

What is valid is said in `config.py`, and pydantic finds what is not; this module puts that into words.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from hybridtrainer.errors import Problem


def problems_of(mistakes: Sequence[ErrorDetails], model: type[BaseModel]) -> list[Problem]:
    """Every mistake in the settings of a model once.

    A union reports each of its branches: the most precise one is told.
    """
    found: dict[str, Problem] = {}
    for mistake in sorted(mistakes, key=lambda each: -len(each["loc"])):
        problem = in_words(mistake, model)
        found.setdefault(problem.key, problem)
    return list(found.values())


def in_words(error: ErrorDetails, model: type[BaseModel]) -> Problem:
    """One mistake in the settings of a model, by the key as it is typed."""
    path = [str(part) for part in error["loc"]]
    key = ".".join(_settings_path(error["loc"], model))
    if error["type"] == "extra_forbidden":
        return Problem(key, "is not a known key.", _suggest_key(path, model))
    if error["type"] == "literal_error":
        expected = str(error.get("ctx", {}).get("expected", ""))
        choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
        given = error["input"]
        return Problem(key, f"is {shorten(given)}, not one of {', '.join(choices)}.", closest(str(given), choices))
    if error["type"] in ("missing", "too_long"):
        return Problem(key, "has the wrong number of values.")
    message = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return Problem(key, f"is {shorten(error['input'])}, and should be {message}.")


def _settings_path(loc: Sequence[int | str], root: type[BaseModel]) -> list[str]:
    """The part of an error's location that is made of our own keys, without pydantic's union labels."""
    path: list[str] = []
    model: type[BaseModel] | None = root
    for part in loc:
        if model is None:
            break
        path.append(str(part))
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    return path


def _suggest_key(path: Sequence[str], root: type[BaseModel]) -> str | None:
    *sections, key = path
    model = root
    for section in sections:
        annotation = model.model_fields[section].annotation
        assert isinstance(annotation, type)
        model = annotation
    homes = [name for name in _all_keys(root, ()) if name.rpartition(".")[2] == key]
    if homes:
        return f"Did you mean {homes[0]}?"
    return closest(key, model.model_fields) or closest(key, _all_keys(root, ()))


def _all_keys(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += _all_keys(inner, (*path, name))
        else:
            keys.append(".".join((*path, name)))
    return keys


def closest(word: str, choices: Sequence[str] | Mapping[str, Any]) -> str | None:
    """What might be meant, as a question; None if nothing is near."""
    near = difflib.get_close_matches(word, list(choices), n=1)
    return f"Did you mean {near[0]}?" if near else None


def shorten(value: Any, limit: int = 60) -> str:
    """A value as code, cut where it is long."""
    text = reprlib.repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
