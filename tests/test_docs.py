"""The documents are true where a machine can tell: code runs, tables are complete, links lead somewhere."""

from __future__ import annotations

import re
import runpy
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrainer import errors
from hybridtrainer.config import PRESETS, DepthConfig, HybridTrainerConfig
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.hooks import EVENTS
from hybridtrainer.named_tasks import NAMED_TASKS
from hybridtrainer.observe.runlog import KINDS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def table_rows(page: str, heading: str) -> list[list[str]]:
    section = page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_guides_code_runs_from_top_to_bottom():
    names: dict[str, Any] = {}
    blocks = code_blocks(ROOT / "docs" / "GUIDE.md")
    assert len(blocks) >= 4
    for block in blocks:
        exec(block, names)
    assert names["trainer"].step_count == 60


def test_the_integrations_code_runs_from_top_to_bottom(tmp_path, monkeypatch):
    for package in ("accelerate", "peft", "lightning"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = code_blocks(ROOT / "docs" / "INTEGRATIONS.md")
    assert len(blocks) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            exec(block, names)
    assert names["trainer"].hybrid.step_count >= 60
    assert names["own"].step_count == 10
    assert (tmp_path / "runs" / "mine" / "statistics.json").exists()
    assert names["steps"].step_count == 5
    assert names["strategy"].hybrid.step_count >= 20
    assert (tmp_path / "out" / "checkpoint-40" / "hybridtrainer" / "manifest.json").exists()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_the_readmes_three_lines_train():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": lambda model, batch: model(batch).square().mean(),
        "loader": [torch.randn(8, 3) for _ in range(20)],
    }
    before = model.weight.detach().clone()
    (block,) = code_blocks(ROOT / "README.md")
    exec(block, names)
    assert names["result"].step == 20
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("name", ["plain_loop", "hybrid_loop"])
def test_the_example_loops_learn(name, capsys):
    pytest.importorskip("sklearn", reason="the digits need scikit-learn")
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 20
    assert losses[-1] < 0.2 < losses[0]


def test_the_hybrid_example_differs_from_the_plain_one_in_three_places():
    plain = (ROOT / "examples" / "plain_loop.py").read_text().splitlines()
    hybrid = (ROOT / "examples" / "hybrid_loop.py").read_text().splitlines()
    new = [line.strip() for line in hybrid[1:] if line.strip() and line not in plain and "print" not in line]
    assert new == [
        "from hybridtrainer import HybridTrainer",
        "trainer = HybridTrainer(model, optimizer, loss_fn)",
        "result = trainer.step(batch)",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_guide_lists_every_setting_with_its_default_and_meaning():
    rows = table_rows((ROOT / "docs" / "GUIDE.md").read_text(), "Settings")[2:]
    sections = ("memory", "depth")
    known = {name: field for name, field in HybridTrainerConfig.model_fields.items() if name not in sections}
    known |= {f"depth.{name}": field for name, field in DepthConfig.model_fields.items()}
    known |= {f"memory.{name}": field for name, field in MemoryConfig.model_fields.items()}
    assert [row[0] for row in rows] == [f"`{name}`" for name in known]
    for (_, default, meaning), field in zip(rows, known.values(), strict=True):
        shown = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        assert (default, meaning) == (f"`{shown}`", field.description)


def test_the_guide_lists_every_named_task_with_its_target():
    rows = table_rows((ROOT / "docs" / "GUIDE.md").read_text(), "Comparing")
    told = {row[0].strip("`"): row[1:] for row in rows if row[0].strip("`") in NAMED_TASKS}
    assert told == {name: [task.about, str(task.target or "median")] for name, task in NAMED_TASKS.items()}


@pytest.mark.parametrize("page", ["README.md", "docs/GUIDE.md"])
def test_pages_that_use_the_digits_install_what_they_need(page):
    assert 'pip install -c constraints.txt ".[demo]"' in (ROOT / page).read_text()


def test_the_guide_names_the_presets_figures():
    page = (ROOT / "docs" / "GUIDE.md").read_text()
    for name in ("conservative", "aggressive"):
        told = page.split(name, 1)[1]
        for value in PRESETS[name].values():
            assert str(value) in told


def test_the_guide_lists_every_hook_event():
    rows = table_rows((ROOT / "docs" / "GUIDE.md").read_text(), "Hooks")[2:]
    assert [tuple(row) for row in rows] == [(f"`{name}`", meaning) for name, meaning in EVENTS.items()]


def test_the_guide_lists_every_field_of_the_log():
    rows = table_rows((ROOT / "docs" / "GUIDE.md").read_text(), "The run folder and its log")
    told = {row[0].strip("`"): set(row[1].split(", ")) for row in rows if len(row) == 2}
    for record, kind in KINDS.items():
        assert told[kind] == {field.name for field in fields(record)}


def test_the_error_page_lists_every_error_with_its_exit_code():
    page = (ROOT / "docs" / "ERRORS.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    told = {row.split("`")[1]: int(row.rstrip("| ").rsplit("|", 1)[1]) for row in rows}
    known = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.HybridTrainerError)
    }
    del known["HybridTrainerError"]
    assert told == known
