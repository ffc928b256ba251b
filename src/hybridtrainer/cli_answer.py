"""How every verb answers: text or one JSON object, and errors of ours as a message and an exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridtrainer.cli_ranks import is_first_launched
from hybridtrainer.errors import ConfigError, HybridTrainerError

ConfigPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG]",
        help="TOML or JSON file, the defaults where left out, or a task by name: digits, stdlib-gpt, mnist, "
        "fashion-mnist, fashion-mnist-small, text.",
    ),
]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. --set optimizer.lr=3e-4.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@contextmanager
def reported(as_json: bool) -> Iterator[Callable[[dict[str, Any], str], None]]:
    """Yields the function that prints a verb's result; errors of ours become a message and an exit code.

    Of several ranks the first answers; the others have errors only to tell, as text.
    """
    as_json = as_json and is_first_launched()

    def answer(content: dict[str, Any], text: str) -> None:
        if is_first_launched():
            typer.echo(json.dumps(content, default=str) if as_json else text)

    try:
        yield answer
    except HybridTrainerError as error:
        if as_json:
            typer.echo(json.dumps({"error": as_content(error)}))
        else:
            typer.echo(f"Error: {error}", err=True)
            for note in getattr(error, "__notes__", []):
                typer.echo(f"       {note}", err=True)
        raise typer.Exit(error.exit_code) from error


def as_content(error: HybridTrainerError) -> dict[str, Any]:
    """An error as it stands in a JSON object."""
    content: dict[str, Any] = {"type": type(error).__name__, "what": error.what, "remedy": error.remedy}
    if isinstance(error, ConfigError):
        content["problems"] = [problem._asdict() for problem in error.problems]
    return content
