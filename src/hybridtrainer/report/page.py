"""Writes a report: one HTML file that needs nothing else and asks for nothing from anywhere.

The page's security policy allows the one style sheet and the one script by their hashes, and nothing more, so that
even a text that got past the escaping could neither run nor load anything.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hybridtrainer import __version__, disk
from hybridtrainer.errors import RunFolderError
from hybridtrainer.report.comparison import Comparison, read_comparison
from hybridtrainer.report.comparison_sections import comparison_sections, comparison_verdict
from hybridtrainer.report.detail import Detail
from hybridtrainer.report.figures import Section, Verdict
from hybridtrainer.report.jump_sections import jump_section
from hybridtrainer.report.outlook_sections import forecast_section, memory_section
from hybridtrainer.report.plan_sections import plan_section
from hybridtrainer.report.profile_sections import profile_section
from hybridtrainer.report.run_sections import NO_PROOF, losses, remarks, time_by_phase, verdict
from hybridtrainer.report.runs import Run, read_run
from hybridtrainer.report.settings_sections import settings_section
from hybridtrainer.report.values import count, plain

LARGEST_BYTES = 1_000_000
GENERATOR = '<meta name="generator" content="hybridtrainer '
INPUTS = frozenset(
    {
        "log.jsonl",
        "config.toml",
        "environment.json",
        "statistics.json",
        "plan.json",
        "profile.csv",
        "result.json",
        "compare.json",
    }
)


def write_report(folders: Sequence[Path], out: Path | None = None, force: bool = False) -> Path:
    """Writes the report of runs and comparisons, whole or not at all, and returns where it is.

    Args:
        folders: Folders of runs (with log.jsonl) or of comparisons (with result.json).
        out: The file to write; `report.html` in the one folder given, or here for several, where left out.
        force: Overwrite a file that is no report. One of ours is overwritten anyway.

    Raises:
        RunFolderError: if something cannot be read or written. Nothing has been written or changed then.
    """
    if not folders:
        raise RunFolderError("There is nothing to report on.", "Name at least one folder of a run.")
    try:
        paths = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
        target = Path(out) if out else (paths[0] if len(paths) == 1 else Path()) / "report.html"
        comparisons, runs = _read(paths)
        _refuse_target(target, paths, force)
    except (OSError, RuntimeError) as error:  # no permission to look, a name that is too long, links in a circle
        raise RunFolderError(f"A folder cannot be used: {error}.", "Name another, or mend it.") from error
    text = ""
    for factor in (1.0, 0.5, 0.25, 0.0):
        text = render(comparisons, runs, factor)
        if len(text.encode()) < LARGEST_BYTES:
            _publish(target, text)
            return target
    raise RunFolderError(
        f"A report of {count(len(paths), 'folder')} would have {len(text.encode()) / 1e6:.1f} MB.",
        "Name fewer of them.",
    )


def render(comparisons: Sequence[Comparison], runs: Sequence[Run], factor: float = 1.0) -> str:
    """The page as text; `factor` below 1 shows less of everything, 0 no chart of a single run."""
    detail = Detail(len(runs) + len(comparisons), factor)
    verdicts = [comparison_verdict(found) for found in comparisons] + [verdict(run) for run in runs]
    sections: list[Section] = []
    for at, found in enumerate(comparisons):
        parts = comparison_sections(at, found, detail)
        alone = len(comparisons) == 1
        sections += [part if alone else replace(part, title=f"{plain(found.name, 60)}: {part.title}") for part in parts]
    if runs:
        sections += [losses(runs, detail), forecast_section(runs, detail), time_by_phase(runs),
                     jump_section(runs, detail), memory_section(runs, detail)]  # fmt: skip
        planned = plan_section({run.name: run.plan for run in runs if run.plan is not None})
        sections += [each for each in (planned, profile_section(runs, detail)) if each is not None]
        sections += [remarks(runs, detail),
                     settings_section({run.name: run.settings for run in runs}),
                     settings_section({run.name: run.environment for run in runs}, "Environment")]  # fmt: skip
    sections = [replace(section, anchor=f"part-{at}") for at, section in enumerate(sections)]
    caveats = [NO_PROOF] if runs and not comparisons else []
    if detail.brief and runs:
        caveats.append("There is no room for charts of single runs; name fewer runs to see them.")
    return _fill(_title(verdicts), verdicts, sections, " ".join(caveats))


def _fill(title: str, verdicts: Sequence[Verdict], sections: Sequence[Section], caveat: str) -> str:
    files = resources.files("hybridtrainer.report")
    style, script = ((files / name).read_text(encoding="utf-8") for name in ("style.css", "hover.js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files / "template.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        version=__version__,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        verdicts=verdicts,
        sections=sections,
        caveat=caveat,
        style=Markup(style),
        style_hash=_hash(style),
        script=Markup(script),
        script_hash=_hash(script),
    )


def _title(verdicts: Sequence[Verdict]) -> str:
    names = [known.name for known in verdicts]
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(paths: Sequence[Path]) -> tuple[list[Comparison], list[Run]]:
    comparisons: list[Comparison] = []
    runs: list[Run] = []
    for path, name in zip(paths, distinct_names(paths), strict=True):
        if not path.is_dir():
            what = "is a file, not a folder" if path.exists() else "is not there"
            raise RunFolderError(f"{path} {what}.", "Name the folder of a run or of a comparison, e.g. runs/run.")
        if (path / "result.json").exists():
            comparisons.append(read_comparison(path))
        elif (path / "log.jsonl").exists():
            runs.append(read_run(path, name))
        elif (path / "compare.json").exists():
            raise RunFolderError(
                f"{path} is a comparison that is not finished: it has no result.json yet.",
                f"Go on with the command that began it, or `hybridtrainer compare CONFIG... --run {path.name}` with "
                "the same configurations and options; it writes the report at its end.",
            )
        else:
            inside = sorted({str(log.parent) for log in [*path.glob("*/log.jsonl"), *path.glob("*/result.json")]})
            hint = f"Did you mean {' '.join(inside[:6])}?" if inside else "Name the folder of a run, e.g. runs/run."
            raise RunFolderError(f"{path} has neither a log.jsonl nor a result.json.", hint)
    return comparisons, runs


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The names of folders, with as much of the path in front as tells them apart.

    >>> distinct_names([Path("/a/plain"), Path("/a/hybrid")]), distinct_names([Path("/a/run"), Path("/b/run")])
    (['plain', 'hybrid'], ['a/run', 'b/run'])
    """
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(len(known) for known in parts) + 1):
        names = ["/".join(known[-depth:]) for known in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _refuse_target(target: Path, paths: Sequence[Path], force: bool) -> None:
    """Everything that may not be overwritten."""
    if "\0" in str(target):
        raise RunFolderError("The name of the report has a NUL character in it.", "Take it out.")
    if target.is_dir():
        raise RunFolderError(f"{target} is a folder.", f"Name a file, e.g. --out {target / 'report.html'}.")
    if not target.parent.is_dir():
        raise RunFolderError(f"The folder {target.parent} is not there.", "Make it, or name another with --out.")
    if not target.exists():
        return
    folder = target.resolve().parent
    if target.name in INPUTS and any(folder == path.resolve() for path in paths):
        raise RunFolderError(f"{target} is what the report is made from.", "Name another file with --out.")
    if not target.is_file():
        raise RunFolderError(f"{target} is not a plain file.", "Name another with --out.")
    if force:
        return
    try:
        with target.open("rb") as file:
            ours = GENERATOR.encode() in file.read(4096)
    except OSError as error:
        raise RunFolderError(f"{target} cannot be read: {error.strerror}.", "Name another with --out.") from error
    if not ours:
        raise RunFolderError(
            f"{target} is there already and is no report of hybridtrainer.",
            "Name another file with --out, or use --force to overwrite it.",
        )


def _publish(target: Path, text: str) -> None:
    draft = target.with_name(f".{target.name[:200]}.{os.getpid()}.draft")
    try:
        draft.unlink(missing_ok=True)
        disk.write_durably(draft, [text.encode()])
        disk.rename_durably(draft, target)
    except OSError as error:
        _forget(draft)
        raise RunFolderError(
            f"{target} cannot be written: {error.strerror}.", "Name another file with --out, or free some space."
        ) from error


def _forget(draft: Path) -> None:
    try:
        draft.unlink(missing_ok=True)
    except OSError:
        return  # the error that matters is the first one
