"""The notebook runs from top to bottom on a CPU, without a notebook server, and shows what it says."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from hybridtrainer.report import Picture

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first_steps.ipynb"


def cells(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell; its value is that of its last line where that is an expression, as in a notebook."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says(capsys, tmp_path, monkeypatch):
    pytest.importorskip("sklearn", reason="the digits need scikit-learn")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    shown = [run_cell(source, names) for source in cells("code")]
    assert [type(value) for value in shown if value is not None] == [Picture]
    assert min(names["plain_accuracy"], names["hybrid_accuracy"]) > 0.9
    assert set(names["phases"]) == {"warmup", "full", "predict", "correct"}
    real = {name: sum(row[-1] for row in names["rows"] if row[0] == name) for name in ("plain", "hybrid")}
    assert real["hybrid"] < real["plain"] == 3 * 240
    assert names["found"].best.memory.mode == "split8"
    assert names["before"] > 5 and names["after"] < 3.5
    assert (names["stopped"].status, names["result"].status) == ("paused", "finished")
    assert names["resumed"].fingerprint() == names["whole"].fingerprint() != names["trainer"].fingerprint()
    assert "equal, bit for bit: True" in capsys.readouterr().out


def test_the_hybrid_loop_has_the_three_lines_and_no_backward_pass_of_its_own():
    plain, hybrid = (next(source for source in cells("code") if part in source) for part in (".backward()", ".step(b"))
    new = [line.strip() for line in hybrid.splitlines() if line not in plain.splitlines()]
    for begin in ("from hybridtrainer import", "trainer = HybridTrainer(", "result = trainer.step(batch)"):
        assert sum(line.startswith(begin) for line in new) == 1
    assert not any(call in hybrid for call in ("backward", "zero_grad", "optimizer.step"))


def test_the_notebook_is_stored_without_results_and_lists_its_parts():
    stored = json.loads(NOTEBOOK.read_text())
    assert stored["nbformat"] == 4
    assert len({cell["id"] for cell in stored["cells"]}) == len(stored["cells"])
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in stored["cells"] if "outputs" in cell)
    first, *others = cells("markdown")
    listed = [line for line in first.splitlines() if line[:1].isdigit()]
    headings = [line[3:] for text in others for line in text.splitlines() if line.startswith("## ")]
    assert [line.split(".")[0] for line in listed] == [line.split(".")[0] for line in headings if line[0].isdigit()]
