"""What is installed is what is here: one version, every file that the code reads, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hybridtrainer
from hybridtrainer.cli import app

ROOT = Path(__file__).parent.parent
PACKAGE = Path(hybridtrainer.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "carry")


def data_files() -> set[str]:
    files = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file())
    return {str(path) for path in files if path.suffix not in (".py", ".pyc")}


def test_the_version_is_written_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hybridtrainer.__version__"}
    written = re.compile(rf'"{re.escape(hybridtrainer.__version__)}"')
    assert [path.name for path in PACKAGE.rglob("*.py") if written.search(path.read_text())] == ["__init__.py"]
    assert CliRunner().invoke(app, ["--version"]).output.strip() == hybridtrainer.__version__
    assert metadata.version("hybridtrainer") == hybridtrainer.__version__, "install again: pip install -e ."
    assert f"## {hybridtrainer.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_data_file_of_the_package_is_declared():
    declared = set(PROJECT["tool"]["setuptools"]["package-data"]["hybridtrainer"])
    assert declared == data_files()
    assert {"py.typed", "report/template.html", "report/style.css", "report/hover.js"} <= declared


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_a_source_distribution_is_told_to_have_what_its_tests_and_links_need():
    told = set((ROOT / "MANIFEST.in").read_text().split())
    linked = re.findall(r"\]\((?!https?:)([\w.]+)", (ROOT / "README.md").read_text())
    needed = {"tests", "Makefile", "constraints.txt", *linked} - {"LICENSE"}
    assert {"docs", "examples", "benchmarks", "recipes", "CHANGELOG.md"} <= needed
    assert needed - told == set()


def build(tree: Path, kind: str, out: Path) -> Path:
    """A wheel or sdist made by the build backend itself, so that nothing is fetched."""
    out.mkdir(exist_ok=True)
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=tree, check=True, capture_output=True)
    (made,) = out.iterdir()
    return made


def make_environment(folder: Path, wheel: Path) -> Path:
    """An environment with the wheel alone; its dependencies are those of this one. Returns its programs."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    programs = folder / "bin"
    install = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    (libraries,) = folder.glob("lib/python*/site-packages")
    (libraries / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return programs


@pytest.mark.slow
def test_the_wheel_made_from_the_sdist_works_in_a_clean_environment(tmp_path):
    setuptools = pytest.importorskip("setuptools", reason="setuptools builds the package")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("needs setuptools 77 or later")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
    with tarfile.open(build(tree, "sdist", tmp_path / "sdist")) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    there = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    here = {str(path.relative_to(ROOT)) for name in ("docs", "examples", "recipes", "tests") for path in
            (ROOT / name).rglob("*") if path.is_file() and path.suffix != ".pyc"}  # fmt: skip
    assert here <= there
    assert {"Makefile", "constraints.txt", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"} <= there
    assert [name for name in there if "__pycache__" in name or name.endswith(".pyc")] == []

    wheel = build(source, "wheel", tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = f"hybridtrainer-{hybridtrainer.__version__}.dist-info/"
    modules = {f"hybridtrainer/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")}
    assert {name for name in names if not name.startswith(information)} == modules | {
        f"hybridtrainer/{name}" for name in data_files()
    }

    programs = make_environment(tmp_path / "clean", wheel)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def say(*command: str) -> str:
        program, *arguments = command
        done = subprocess.run([str(programs / program), *arguments], cwd=elsewhere, env=kept, capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    where = "import hybridtrainer, importlib.metadata as m; print(hybridtrainer.__file__, m.version('hybridtrainer'))"
    file, version = say("python", "-c", where).split()
    assert Path(file).is_relative_to(tmp_path / "clean")
    assert version == say("hybridtrainer", "--version") == say("python", "-m", "hybridtrainer", "--version")
    assert version == hybridtrainer.__version__
    assert "verify-resume" in say("hybridtrainer", "--help")
    sizes = ["--vram", "4GB", "--ram", "16GB", "--seq", "512", "--tokens", "4096", "--json"]
    assert json.loads(say("hybridtrainer", "plan", "--model", "gpt2-124m", *sizes))["best"]
    few = ["--set", "train.steps=6", "--set", "train.batch_size=2", "--set", "model.context=32", "--json"]
    assert json.loads(say("hybridtrainer", "train", *few))["steps"] == 6
    assert json.loads(say("hybridtrainer", "report", "runs/run", "--json"))["bytes"] > 10_000
    assert "</html>" in (elsewhere / "runs" / "run" / "report.html").read_text()
