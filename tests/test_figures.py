"""The measured numbers of the pages are those of the result files, and measured tables have no others."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from benchmarks.figures import PAGES
from benchmarks.figures.values import Figures
from benchmarks.plan_accuracy import told_apart
from benchmarks.record import RESULTS
from benchmarks.stream import newest_rows
from benchmarks.validation.results import everything, reserved

ROOT = Path(__file__).parent.parent
FIGURES: dict[str, Figures] = {page: figures() for page, figures in PAGES.items()}
PIECES = [
    (page, where, piece) for page, found in FIGURES.items() for where, pieces in found.items() for piece in pieces
]
HEAD = "| what | result | made by |"

# Numbers that say how something was measured and not what came out.
SETTINGS = {
    "README.md": ["Capped to 7.5 GB", "FSDP2"],
    "docs/MEASURED.md": ["90% intervals", "8-bit weights", "a planted loss of 1%"],
}
SECTIONS: dict[tuple[str, str], list[str]] = {
    ("docs/PREDICTION.md", "## Measured"): [
        "H200", "Intervals are 95%", "wikitext-2", "8 x 256, 1,500 steps", "32-64-64", "16-32-32", "a rate of 4e-3",
        "GPT-2 124M, 1,000 steps", "GPT-2 124M on", "The 124M's", "But for the 124M", "(1,000 steps of 4,096 tokens",
        "foresight_gpt2_124m_part.json",
        "after 640 of the 1,000 steps",
        "(1.6 times against averaged read-out, 2.2 against decays)",  # hoped for
        "they took 3 to 4 of 15 ms (timed by hand)", "1.5 was hoped for", "a step of 15 ms",
        "--seeds 5`", "--seeds 4`: bf16, 6,000 steps", "64 tokens at once", "of rank 8",
        "384 steps of 8 windows on a text of 511", "hoped for, 1.25 times", "At most 2% was the aim",
        "nets of 8 x 8 pixels",
        "(a window of 100 steps)", "grew at 0.55 of the run", "Grown at 0.65",
        "broken off at 4,560 of 6,000 steps with four seeds", "to 90.5% and",
    ],
    ("docs/PREDICTION.md", "### How good its forecasts are"): [
        "(600 steps; Fashion-MNIST 1,200)", "5, 20, 50 steps", "5 steps", "20 steps", "50 steps",
        "90% intervals that held", "90% bootstrap interval", "outside 85 to 95%", "a run of 600 steps",
        "within 600 to 1,200 steps", "below 1",
        "0.99 of the power law's error on that Fashion-MNIST run (a trial by hand)",
        "between 0.991 and 1.001 of the blend's error (not kept as a result)",
    ],
}  # fmt: skip


@cache
def lines(page: str) -> list[str]:
    return (ROOT / page).read_text().splitlines()


def line_of(page: str, where: str) -> int:
    found = [number for number, line in enumerate(lines(page)) if line.startswith(where)]
    assert len(found) == 1, f"{page}: {len(found)} rows begin with {where!r}"
    return found[0]


def is_head(page: str, where: str) -> bool:
    below = line_of(page, where) + 1
    return where.startswith("|") and any(line.startswith("|--") for line in lines(page)[below : below + 1])


def table(page: str, head: str) -> list[str]:
    """The rows below a head."""
    below = lines(page)[line_of(page, head) + 2 :]
    end = next(number for number, line in enumerate([*below, ""]) if not line.startswith("|"))
    return below[:end]


def place(page: str, where: str) -> str:
    """A whole table, a row, or a paragraph or point of a list from where a sentence begins."""
    if where.startswith("|"):
        return "\n".join(table(page, where)) if is_head(page, where) else lines(page)[line_of(page, where)]
    parts = re.split(r"\n\n|\n(?=[-*] )", (ROOT / page).read_text())
    found = [part for part in (" ".join(part.split()) for part in parts) if where in part]
    assert len(found) == 1, f"{page}: {len(found)} paragraphs have {where!r}"
    return found[0][found[0].index(where) :]


def section(page: str, heading: str) -> str:
    text = (ROOT / page).read_text().split(f"\n{heading}\n", 1)[1]
    end = re.search(rf"^#{{2,{heading.count('#')}}} ", text, flags=re.M)
    return " ".join(text[: end.start() if end else None].split())


def whole(piece: str) -> str:
    """A pattern for the piece where it neither begins nor ends within a number."""
    return rf"(?<![\d.,]){re.escape(piece)}(?!\d|[.,]\d)"


def unexplained(text: str, pieces: list[str]) -> list[str]:
    """Numbers of a text that are in none of the pieces, with what stands around them."""
    for piece in sorted(pieces, key=len, reverse=True):
        text = re.sub(whole(piece), " ... ", text)
    return re.findall(r".{,20}\d[\d.,]*.{,20}", text)


def test_measured_numbers_are_those_of_the_result_files():
    wrong = [each for each in PIECES if not re.search(whole(each[2]), place(*each[:2]))]
    assert wrong == [], "(page, row or sentence, what the result files say)"


@pytest.mark.parametrize("page", SETTINGS)
def test_every_result_of_a_table_of_results_has_a_source(page):
    outcomes = {row: re.sub(r"\]\(.*?\)", "]", row.split(" | ")[1]) for row in table(page, HEAD)}
    for row, outcome in outcomes.items():
        pieces = [piece for where, found in FIGURES[page].items() if row.startswith(where) for piece in found]
        assert unexplained(outcome, [*pieces, *SETTINGS[page]]) == [], (
            f"{row}: their source belongs in benchmarks/figures"
        )
    for setting in SETTINGS[page]:
        assert any(setting in outcome for outcome in outcomes.values()), f"{setting!r} is in no result"


@pytest.mark.parametrize(("page", "heading"), SECTIONS)
def test_every_number_of_a_measured_section_has_a_source(page, heading):
    pieces = [piece for found in FIGURES[page].values() for piece in found]
    text, settings = section(page, heading), SECTIONS[page, heading]
    assert unexplained(text, [*pieces, *settings]) == []
    assert [setting for setting in settings if setting not in text] == []


def test_the_measured_tables_on_memory_are_complete():
    heads = [where for where in FIGURES["docs/MEMORY.md"] if is_head("docs/MEMORY.md", where)]
    assert len(heads) == 2
    for head in heads:
        assert table("docs/MEMORY.md", head) == FIGURES["docs/MEMORY.md"][head]


def test_a_number_within_another_is_not_taken_for_it():
    assert unexplained("10.5 GB", ["0.5 GB"]) == ["10.5 GB"]
    assert unexplained("for 1.53", ["1.5"]) == ["for 1.53"]
    assert unexplained("saves 1,000.", ["1,000"]) == []


def test_plans_stand_beside_what_was_measured():
    kept = json.loads((RESULTS / "plan_accuracy.json").read_text())["runs"]
    measured = {run: row["reserved_peak_bytes"] for run, row in newest_rows().items()}
    for file in sorted(RESULTS.glob("resident_*.json")):
        result = json.loads(file.read_text())
        shape = f"{result['model']}, {result['batch']} x {result['context']}"
        rows = {name: row for name, row in result["rows"].items() if name != "unfused attention"}
        for name, row in rows.items():
            measured[told_apart(f"{shape}: {name}", measured)] = row["reserved_peak_bytes"]
    assert {name: pairs["gpu"][1] for name, pairs in kept.items()} == {
        name: count / 2**30 for name, count in measured.items()
    }, "python -m benchmarks.plan_accuracy"


def test_plans_of_the_validation_stand_beside_what_was_measured():
    kept = json.loads((RESULTS / "plan_accuracy.json").read_text())["validated"]
    assert {name: pairs["gpu"][1] for name, pairs in kept.items()} == {
        name: reserved(row) for name, row in everything().items()
    }, "python -m benchmarks.plan_accuracy"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_result_says_how_it_was_made(file):
    assert {"date", "command", "environment"} <= set(json.loads(file.read_text()))
