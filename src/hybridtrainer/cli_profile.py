"""`hybridtrainer profile`: what memory a few steps of a configuration take, by phase and component."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridtrainer.cli_answer import AsJson, ConfigPath, Overrides, Quiet, as_content, reported
from hybridtrainer.errors import ConfigError, HybridTrainerError, Problem, RunFolderError

if TYPE_CHECKING:
    from hybridtrainer.config import RunConfig


def profile(
    config: ConfigPath = None,
    steps: Annotated[int, typer.Option(min=1, help="Where the clock stops.")] = 20,
    overrides: Overrides = [],  # noqa: B006
    spike: Annotated[str, typer.Option(help="A step this much above the one before is a spike.")] = "100MB",
    csv: Annotated[Path | None, typer.Option(help="Write every snapshot to this .csv file.")] = None,
    jsonl: Annotated[Path | None, typer.Option(help="Write every snapshot to this .jsonl file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts to this .html file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a few steps and show the memory they take, by phase and component, beside the plan where there is one."""
    with reported(as_json) as answer:
        from hybridtrainer.config_io import load_config

        resolved = load_config(config, overrides)
        spike_bytes = _spike_bytes(spike)
        for path, ending in ((csv, ".csv"), (jsonl, ".jsonl"), (html, ".html")):
            _refuse(path, ending, force)
        from hybridtrainer.observe.progress import Unbreakable, make_progress
        from hybridtrainer.observe.snapshots import write_snapshots
        from hybridtrainer.profile_run import profile_run
        from hybridtrainer.profile_text import as_data, profile_text
        from hybridtrainer.report import write_report

        shown = Unbreakable(make_progress("off" if quiet or as_json else "auto", "profiling"))
        with tempfile.TemporaryDirectory(prefix="hybridtrainer-profile-") as scratch:
            folder = Path(scratch) / "profile"
            folder.mkdir()
            found = profile_run(resolved, steps, folder, spike_bytes, shown)
            written = [path for path in (csv, jsonl) if path is not None]
            for path in written:
                write_snapshots(path, found.snapshots)
            if html is not None and found.snapshots:
                written.append(write_report([folder], html, force))
        lines = [profile_text(found.report, found.plan, found.against_plan)]
        lines += _hint(resolved, steps, set(found.report.phases)) if found.error is None else []
        lines += [f"Wrote {path}." for path in written]
        data = {**as_data(found.report, found.plan, found.against_plan), "written": [str(path) for path in written]}
        if as_json and isinstance(found.error, HybridTrainerError):
            answer({**data, "error": as_content(found.error)}, "")  # one object, whatever happens
            raise typer.Exit(found.error.exit_code) from found.error
        answer(data, "\n".join(lines))
        if found.error is not None:
            raise found.error
        if found.signal is not None:
            raise typer.Exit(128 + found.signal)


def _spike_bytes(size: str) -> int:
    from hybridtrainer.config_memory import size_in_bytes

    try:
        found = size_in_bytes(size)
    except ValueError as error:
        raise ConfigError(
            "the command line", [Problem("spike", f"must be {error}")], "Use such as --spike 100MB."
        ) from error
    if not found:
        raise ConfigError("the command line", [Problem("spike", "must be positive")], "Use such as --spike 100MB.")
    return found


def _refuse(path: Path | None, ending: str, force: bool) -> None:
    """Refuses a file that could not be written, before anything is trained."""
    if path is None:
        return
    if path.suffix != ending:
        raise RunFolderError(f"{path} does not end in {ending}.", f"Name another, such as profile{ending}.")
    try:
        if not path.parent.is_dir():
            raise RunFolderError(f"The folder {path.parent} is not there.", "Make it, or name another.")
        if path.is_dir() or (path.exists() and not force):
            what, remedy = ("is a folder", "") if path.is_dir() else ("is there already", ", or use --force")
            raise RunFolderError(f"{path} {what}.", f"Name another{remedy}.")
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be used: {error}.", "Name another file.") from error


def _hint(config: RunConfig, steps: int, seen: set[str]) -> list[str]:
    hints = []
    if steps > config.train.steps:
        hints.append(f"The run is over after train.steps = {config.train.steps}.")
    if seen == {"warmup"} and config.predict != "off":
        hints.append(
            f"Only Warmup was seen, which has {config.warmup_steps} steps: other phases show with more --steps, or "
            "with --set warmup_steps=4 --set full_steps=4."
        )
    return hints
