"""Where the measured numbers of the pages come from: each as a piece of text, made from the result files.

For every page a function gives, by the beginning of a row or sentence, the pieces of text that must stand there; a key
that is the head of a table means the whole table. `tests/test_figures.py` compares them with the pages: when a result
is measured again, it says which pages have to follow. Nothing is measured here, and what the pages say around their
numbers is not known. The tables of plans in docs/PLANS.md, which `benchmarks.plan_accuracy` prints, are not here.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.figures.measured import measured
from benchmarks.figures.others import distributed, integrations, memory, start, validation
from benchmarks.figures.prediction import prediction
from benchmarks.figures.readme import readme
from benchmarks.figures.values import Figures

PAGES: dict[str, Callable[[], Figures]] = {
    "README.md": readme,
    "docs/DISTRIBUTED.md": distributed,
    "docs/INTEGRATIONS.md": integrations,
    "docs/MEASURED.md": measured,
    "docs/MEMORY.md": memory,
    "docs/PREDICTION.md": prediction,
    "docs/START.md": start,
    "docs/VALIDATION.md": validation,
}
