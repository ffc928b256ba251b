"""What a plan is asked for, looked at before anything is rehearsed: every mistake that shows at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from hybridtrainer.config_memory import size_in_bytes
from hybridtrainer.config_problems import shorten
from hybridtrainer.errors import Problem
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.hardware import Hardware
from hybridtrainer.planning.sources import is_there, not_there

READOUTS = ("auto", "last", "averaged")
MOST_TOKENS = 1 << 22  # a rehearsal goes through every tile of them


def mistakes(
    model: Any,
    budgets: Mapping[str, Any],
    tokens: int,
    context: int,
    accumulate: int,
    readout: str = "auto",
    hardware: Any = None,
    context_bytes: Any = None,
    loss: Any = language_loss,
) -> list[Problem]:
    """All that is wrong with what `plan` is given, its model's name included.

    A name that is not known is told in company only: alone it is an error of its own, where the model is loaded.

    Args:
        model: As `plan` takes it.
        budgets: Sizes of memory by name.
    """
    found = [problem for name, size in budgets.items() if (problem := _budget_problem(name, size)) is not None]
    found += batch_problems(tokens, context, accumulate)
    if hardware is not None and not isinstance(hardware, Hardware):
        hint = 'Look speeds up by name: `hybridtrainer.planning.speeds.speeds_for("h200")`.'
        found.append(Problem("hardware", f"must be a `Hardware`, not {shorten(hardware)}.", hint))
    if context_bytes is not None and not (_is_whole(context_bytes) and context_bytes >= 0):
        found.append(Problem("context_bytes", f"must be a number of bytes, 0 or more, not {shorten(context_bytes)}"))
    if not callable(loss):
        found.append(Problem("loss", f"must be a function of model and tokens, not {shorten(loss)}"))
    if readout not in READOUTS:
        found.append(Problem("readout", f"must be one of {', '.join(READOUTS)}, not {readout!r}"))
    if found and isinstance(model, str) and not is_there(model):
        found.append(Problem("model", *not_there(model)))
    return found


def batch_problems(tokens: int, context: int, accumulate: int) -> list[Problem]:
    """What keeps so many tokens from being whole sequences and whole micro-batches."""
    asked = {"tokens": tokens, "context": context, "accumulate": accumulate}
    problems = [
        Problem(name, f"must be a whole number, not {shorten(value)}")
        for name, value in asked.items()
        if not _is_whole(value)
    ]
    if problems:
        return problems
    given = {"tokens": tokens, "seq": context, "accumulate": accumulate}
    problems = [Problem(name, f"must be positive, not {value}") for name, value in given.items() if value <= 0]
    if tokens > MOST_TOKENS:
        problems.append(Problem("tokens", f"{tokens} are more than the {MOST_TOKENS} that can be planned for"))
    if not problems and tokens % context:
        problems.append(Problem("tokens", f"{tokens} are no whole sequences of {context}"))
    elif not problems and tokens // context % accumulate:
        problems.append(
            Problem("accumulate", f"{tokens // context} sequences are no {accumulate} micro-batches of one size")
        )
    return problems


def _budget_problem(name: str, size: Any) -> Problem | None:
    try:
        found = size_in_bytes(size) if isinstance(size, str) else size
    except ValueError as error:
        return Problem(name, f"must be {error}, not {shorten(size)}")
    return None if _is_whole(found) and found > 0 else Problem(name, f"must be a positive size, not {size!r}")


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
