"""docs/CONFIGURATION.md is what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from hybridtrainer.cli import app
from hybridtrainer.cli_reference import reference_page

PAGE = Path(__file__).parent.parent / "docs" / "CONFIGURATION.md"


def test_the_page_is_what_the_command_prints():
    command = [sys.executable, "-m", "hybridtrainer.cli_reference"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == PAGE.read_text(), "python -m hybridtrainer.cli_reference > docs/CONFIGURATION.md"


def test_the_page_has_every_option_of_every_command():
    commands = re.split(r"^### ", reference_page().split("## Commands\n")[1], flags=re.M)
    shared, commands = commands[0], commands[1:]
    assert len(commands) == 12
    for text in commands:
        name = text.splitlines()[0]
        helped = CliRunner().invoke(app, [*name.split(), "--help"]).output
        options = set(re.findall(r"(?<![\w-])(--[\w-]+)", helped.split("Options:")[1])) - {"--help", "--set"}
        told = set(re.findall(r"(?:\[|^\| `)(--[\w-]+)", text, flags=re.M)) - {"--set"}  # named in the help of --set
        assert told == {each for each in options if not each.startswith("--no-")}, name
    assert re.findall(r"^\| `(--\w+)", shared, flags=re.M) == ["--set", "--quiet", "--json"]


def test_what_must_be_given_is_told_apart_from_what_may_be():
    page = reference_page()
    assert "hybridtrainer resume RUN [--quiet] [--json]" in page
    assert "hybridtrainer train [CONFIG] [--set KEY=VALUE] [--quiet] [--json]" in page
    assert "| `RUN` | Folder of the run, e.g. runs/run. | needed |" in page
    assert "| `--pause-at N` |" in page
