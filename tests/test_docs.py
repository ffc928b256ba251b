"""The documents are true where a machine can tell: code runs, tables are complete, links lead somewhere."""

from __future__ import annotations

import re
import runpy
import tomllib
import warnings
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrainer import errors
from hybridtrainer.hooks import EVENTS
from hybridtrainer.named_tasks import NAMED_TASKS
from hybridtrainer.observe.runlog import KINDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "recipes").glob("*.md"), *(ROOT / "examples").glob("*.ipynb")]
)


def outside_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page: lower case, no punctuation, dashes for spaces, a number when taken."""
    found: Counter[str] = Counter()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", outside_code(page), flags=re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found[slug] += 1
        if found[slug] > 1:
            found[f"{slug}-{found[slug] - 1}"] += 1
    return set(found)


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def table_rows(page: str, heading: str) -> list[list[str]]:
    section = page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_code_for_your_own_model_runs_from_top_to_bottom():
    names: dict[str, Any] = {}
    blocks = code_blocks(DOCS / "OWN_MODEL.md")
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    assert names["trainer"].step_count == 60


def test_the_code_for_memory_runs_from_top_to_bottom():
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    blocks = code_blocks(DOCS / "MEMORY.md")
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    tokens = torch.randint(256, (2, 65))
    assert names["streaming"].step(tokens).loss == pytest.approx(5.5, abs=0.5)
    assert names["tuning"].step(tokens).step == 1
    assert names["watched"].step_count == 3
    assert names["report"].phases["full"].components["gradients"] > 0


def test_every_page_with_code_is_run():
    others = [page.name for page in PAGES if code_blocks(page)]
    assert others == ["README.md", "INTEGRATIONS.md", "MEMORY.md", "OWN_MODEL.md"]


def test_the_integrations_code_runs_from_top_to_bottom(tmp_path, monkeypatch):
    for package in ("accelerate", "peft", "lightning"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = code_blocks(DOCS / "INTEGRATIONS.md")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page):
    for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", outside_code(page)):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if heading:
            assert heading in anchors(file), f"{page.name} links to {target}#{heading}"


def test_headings_get_the_anchors_that_github_gives_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Will it fit?\n## `fit`, again\n```\n# no heading\n```\n## fit\n## fit\n## By [name](x.md) a_b-c\n"
    )
    assert anchors(page) == {"will-it-fit", "fit-again", "fit", "fit-1", "by-name-a_b-c"}


def test_every_page_can_be_reached_from_the_readme():
    targets = re.findall(r"\]\((docs/\w+\.md)\)", (ROOT / "README.md").read_text().split("## Read on")[1])
    assert sorted(targets) == [f"docs/{page.name}" for page in sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_list_of_sections_is_complete_and_in_order(page):
    listed = re.findall(r"^\d+\. \[([^\]]+)\]\(#", page.read_text().split("\n## ")[0], flags=re.M)
    if listed:
        assert listed == re.findall(r"^## (.*)$", outside_code(page), flags=re.M)


def test_every_named_task_is_listed_with_its_target():
    rows = table_rows((DOCS / "START.md").read_text(), "Comparing")
    told = {row[0].strip("`"): row[1:] for row in rows if row[0].strip("`") in NAMED_TASKS}
    assert told == {name: [task.about, str(task.target or "median")] for name, task in NAMED_TASKS.items()}


@pytest.mark.parametrize("page", ["README.md", "docs/START.md"])
def test_pages_that_use_the_digits_install_what_they_need(page):
    assert 'pip install -c constraints.txt ".[demo]"' in (ROOT / page).read_text()


def test_every_hook_event_is_listed():
    rows = table_rows((DOCS / "OWN_MODEL.md").read_text(), "Hooks")[2:]
    assert [tuple(row) for row in rows] == [(f"`{name}`", meaning) for name, meaning in EVENTS.items()]


def test_every_field_of_the_log_is_listed():
    rows = table_rows((DOCS / "START.md").read_text(), "The run folder and its log")
    told = {row[0].strip("`"): set(row[1].split(", ")) for row in rows if len(row) == 2}
    for record, kind in KINDS.items():
        assert told[kind] == {field.name for field in fields(record)}


def test_every_extra_is_listed():
    rows = table_rows((DOCS / "START.md").read_text(), "Install")[2:]
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(told) == sorted(known)


def test_every_error_is_listed_with_its_exit_code():
    rows = table_rows((DOCS / "TROUBLESHOOTING.md").read_text(), "Errors")[2:]
    told = {row[0].strip("`"): int(row[-1]) for row in rows}
    known = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.HybridTrainerError)
    }
    del known["HybridTrainerError"]
    assert told == known
