"""docs/CONFIGURATION.md, made from the code: every setting, every command with its options.

    python -m hybridtrainer.cli_reference > docs/CONFIGURATION.md

It reads the signatures of the commands, as typer does; its only own words say how settings are given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo, ParameterInfo

from hybridtrainer.cli import app
from hybridtrainer.cli_answer import AsJson, ConfigPath, Overrides, Quiet
from hybridtrainer.config_reference import settings_page

_HEAD = """# Settings and commands

Made from the code by `python -m hybridtrainer.cli_reference > docs/CONFIGURATION.md`; a test compares them.

Settings are one TOML file, or JSON. `hybridtrainer init` writes it with every key explained, `hybridtrainer validate`
lists every mistake at once, `--set section.key=value` overrides one. Every key is optional. A key that is unknown is
refused, and so is one that the rest of the file makes meaningless (`optimizer.momentum` with AdamW)."""
_COMMANDS = """## Commands

`python -m hybridtrainer` is the same as `hybridtrainer`. What is in brackets may be left out; exit codes are in
[TROUBLESHOOTING.md](TROUBLESHOOTING.md#exit-codes). These mean the same in every command that takes them:"""
_SHARED = {"config": ConfigPath, "overrides": Overrides, "quiet": Quiet, "as_json": AsJson}
_VALUES = {int: "N", float: "X", Path: "FILE"}


@dataclass(frozen=True)
class _Parameter:
    written: str
    meaning: str
    default: str
    is_argument: bool
    is_shared: bool

    def row(self) -> str:
        return f"| `{self.written}` | {self.meaning} | {self.default} |"


def reference_page() -> str:
    """The whole page."""
    shared = [_parameter(name, annotation, None) for name, annotation in _SHARED.items()]
    commands = [_described(name, function) for name, function in _commands(app, "hybridtrainer")]
    return "\n\n".join([_HEAD, settings_page(), f"{_COMMANDS}\n\n{_table(shared)}", *commands]) + "\n"


def _commands(group: typer.Typer, path: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{path} {command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _commands(inner.typer_instance, f"{path} {inner.name}")


def _described(name: str, function: Callable[..., Any]) -> str:
    hints = get_type_hints(function, include_extras=True)
    parameters = [
        _parameter(each.name, hints[each.name], each.default)
        for each in inspect.signature(function).parameters.values()
    ]
    about = " ".join(inspect.cleandoc(function.__doc__ or "").split())
    named = [each for each in parameters if each.is_argument or each.is_shared]
    usage = [each.written if each.default == "needed" else f"[{each.written}]" for each in named]
    own = [each for each in parameters if not each.is_shared]
    text = f"### {name.removeprefix('hybridtrainer ')}\n\n{about}\n\n```\n{' '.join([name, *usage])}\n```"
    return f"{text}\n\n{_table(own)}" if own else text


def _parameter(name: str, annotation: Any, default: object) -> _Parameter:
    info: ParameterInfo = annotation.__metadata__[0]
    is_argument = isinstance(info, ArgumentInfo)
    if is_argument:
        written = (info.metavar or name.upper()).strip("[]")
    else:
        # Inside Annotated[...] the first name that an option is given is where typer keeps defaults.
        names = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
        longest = max(names, key=len) if names else f"--{name.replace('_', '-')}"
        written = longest if annotation.__origin__ is bool else f"{longest} {_value(longest, info, annotation)}"
    return _Parameter(written, info.help or "", _default(default), is_argument, annotation == _SHARED.get(name))


def _value(option: str, info: ParameterInfo, annotation: Any) -> str:
    kinds = get_args(annotation.__origin__) or (annotation.__origin__,)
    return info.metavar or _VALUES.get(kinds[0], option.rsplit("-", maxsplit=1)[-1].upper())


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "needed"
    return "" if value in (None, False, []) else f"`{value}`"


def _table(parameters: Sequence[_Parameter]) -> str:
    rows = [each.row() for each in parameters]
    return "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(reference_page(), end="")
