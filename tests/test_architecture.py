"""The shape of the project: import direction, public names, one test file for each module, light imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import hybridtrainer

PACKAGE = Path(hybridtrainer.__file__).parent
TESTS = Path(__file__).parent

# A module may import from its own row and from those below it, and within a row there is no circle.
ROWS: list[set[str]] = [
    {
        "cli",
        "cli_bench",
        "cli_doctor",
        "cli_plan",
        "cli_profile",
        "cli_answer",
        "cli_ranks",
        "cli_reference",
        "__main__",
    },
    {"compare", "integrations"},
    {"resume_proof", "profile_run", "profile_text", "tasks", "report", "bench"},
    {"trainer", "fit", "planning"},
    {"foresight"},
    {"standing", "feed", "setup_checks", "rank_checks", "streamed_step", "smaller_step"},
    {"phases", "predict", "observe", "memory", "models", "data", "real_step"},
    {
        "measure",
        "buffer_guard",
        "schedule",
        "weights",
        "state",
        "checkpoint",
        "manifest",
        "rank_files",
        "tensor_file",
        "replicas",
        "hooks",
        "run_folder",
        "signals",
        "losses",
        "sample_weights",
        "parts",
        "blocks",
        "kernels",
    },
    {"randomness", "tree", "determinism", "ranks"},
    {
        "records",
        "fit_result",
        "config",
        "config_conflicts",
        "config_io",
        "config_memory",
        "config_reference",
        "config_section",
        "config_problems",
        "disk",
        "errors",
        "named_tasks",
        "sizes",
    },
    {"__init__"},
]
NEVER_TOGETHER = [
    ("predict", "memory"),
    ("phases", "predict"),
    ("phases", "weights"),
    ("models", "trainer"),
    ("data", "predict"),
]


@cache
def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def imports(path: Path, *, at_run_time_only: bool = False) -> set[str]:
    """Modules of this package that a file imports, type-checking blocks left out."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hybridtrainer"):
            base = (node.module or "").removeprefix("hybridtrainer").removeprefix(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".strip(".")
                found.add(name if name in modules() else base or "__init__")
    return found


def row_of(module: str) -> int:
    top = module.split(".", maxsplit=1)[0] or "__init__"
    for index, row in enumerate(ROWS):
        if top in row:
            return index
    pytest.fail(f"{module} is in no row: say where it belongs")


def test_imports_point_downward():
    for module, path in modules().items():
        for imported in imports(path):
            assert row_of(module) <= row_of(imported), f"{module} imports {imported}, which is above it"


def test_imports_have_no_circle():
    # `HybridTrainer.fit` imports the loop when it is called, and the loop imports no trainer.
    graph = {module: imports(path) - {"__init__"} for module, path in modules().items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module in done:
            return
        for imported in graph.get(module, ()):
            visit(imported, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize(("one", "other"), NEVER_TOGETHER)
def test_neighbours_do_not_know_each_other(one, other):
    for module, path in modules().items():
        if module.split(".")[0] == one:
            assert not any(imported.split(".")[0] == other for imported in imports(path)), f"{module} imports {other}"


def test_public_names_do_not_drift():
    assert hybridtrainer.__all__ == [
        "FitResult", "HybridTrainer", "HybridTrainerConfig", "JumpRecord", "MemoryConfig", "Phase", "PhaseChange",
        "StepResult", "language_loss", "plan", "stream",
    ]  # fmt: skip
    for name in hybridtrainer.__all__:
        assert getattr(hybridtrainer, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        _ = hybridtrainer.Trainer
    assert (PACKAGE / "py.typed").exists()


def test_every_module_has_its_test_file():
    missing = []
    for module, path in modules().items():
        if path.name in ("__init__.py", "__main__.py"):
            continue
        parts = module.split(".")
        expected = TESTS.joinpath(*parts[:-1], f"test_{parts[-1]}.py")
        if not expected.exists():
            missing.append(str(expected.relative_to(TESTS)))
    assert missing == []


def test_importing_the_package_has_no_side_effect(tmp_path):
    script = """
import os, socket, subprocess, sys, threading, warnings
def forbidden(*a, **k): raise AssertionError("network or subprocess at import")
socket.socket.connect = forbidden
subprocess.Popen.__init__ = forbidden
os.system = forbidden
before = dict(os.environ), threading.active_count(), list(warnings.filters)
import hybridtrainer
assert "torch" not in sys.modules
assert (dict(os.environ), threading.active_count(), list(warnings.filters)) == before
import hybridtrainer.cli, hybridtrainer.config_io
assert "torch" not in sys.modules
import torch, random
state, python = torch.get_rng_state(), random.getstate()
import hybridtrainer.trainer, hybridtrainer.fit, hybridtrainer.tasks
assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.strip() == "fine", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_files_stay_small():
    long = {path.name: len(path.read_text().splitlines()) for path in modules().values()}
    allowed = {"trainer.py": 620, "cli.py": 330}  # the whole algorithm, and every verb, in one place each
    assert {name: lines for name, lines in long.items() if lines > allowed.get(name, 320)} == {}
