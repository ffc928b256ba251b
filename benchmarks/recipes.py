"""Writes recipes/: a configuration for every model on every card that it fits, and what keeps it from fitting others.

python -m benchmarks.recipes

Each file is what `hybridtrainer plan --write` makes with the command in its comment; here plans for several cards share
one rehearsal of a model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hybridtrainer.errors import MemoryBudgetError
from hybridtrainer.planning.describe import name_of
from hybridtrainer.planning.planner import Plan, choose
from hybridtrainer.planning.recipe import recipe
from hybridtrainer.planning.rehearsals import Rehearsals
from hybridtrainer.sizes import GIB, as_size

FOLDER = Path(__file__).parents[1] / "recipes"
# Memory of the card, and host memory free for training, both in GB: machines of 16, 32, 64, 64 and 128 GB, of which the
# system and others keep 4.
CARDS = {4: 12, 8: 28, 12: 60, 16: 60, 24: 124}
CONTEXTS = {
    "gpt2-124m": 1024,
    "gpt2-350m": 1024,
    "gpt2-1.5b": 1024,
    "llama-7b": 2048,
    "llama-13b": 2048,
    "llama-50b": 2048,
}
TOKENS = (16384, 4096, 2048)  # in a step; fewer are tried where more do not fit

INTRODUCTION = f"""# Recipes

Configurations for `hybridtrainer train`, made by the planner for cards of {", ".join(map(str, CARDS))} GB:

```
hybridtrainer train recipes/gpt2-350m-8gb.toml
```

Each names the command that made it, the host memory that it assumes to be free
({", ".join(map(str, CARDS.values()))} GB beside these cards: machines of 16, 32, 64, 64 and 128 GB of which others
keep 4; the next larger one's where a model needs more), and what it takes. They hold for any card of that memory, so
they were planned without speeds; `hybridtrainer plan` with the speeds of your card may find something faster. Steps
have 16,384 tokens where that fits. Data and learning rate are the defaults: put in your own. None of them was trained
on such a card; what plans are worth is [here](../docs/MEMORY.md#will-it-fit), and plans of one slot were never measured
beside a run. `python -m benchmarks.recipes` makes them all, and a test compares them with what the planner says today.
"""


class Recipe(NamedTuple):
    """One model on one card.

    Attributes:
        found: Its plan; None where nothing fits.
        reason: Why nothing fits.
    """

    model: str
    card: int
    found: Plan | None
    reason: str

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.model}-{self.card}gb.toml"


def recipes(models: Sequence[str] = tuple(CONTEXTS)) -> Iterator[Recipe]:
    """All of them, model by model."""
    for model in models:
        rehearsals: dict[int, Rehearsals] = {}
        for card, ram in CARDS.items():
            yield _plan(model, card, ram, rehearsals)


def _plan(model: str, card: int, ram: int, rehearsals: dict[int, Rehearsals]) -> Recipe:
    reason = ""
    for larger in sorted({each for each in CARDS.values() if each >= ram}):
        for tokens in TOKENS:
            if tokens not in rehearsals:
                rehearsals[tokens] = Rehearsals(model, tokens, CONTEXTS[model])
            try:
                return Recipe(model, card, choose(rehearsals[tokens], card * GIB, larger * GIB), "")
            except MemoryBudgetError as error:
                reason = error.what
                if reason.startswith("Host memory"):  # which the batch has little to do with
                    break
        else:
            break  # it is the GPU's memory that is short
    return Recipe(model, card, None, reason)


def overview(made: Sequence[Recipe]) -> str:
    """The table of all, and why some are missing."""
    lines = [
        INTRODUCTION,
        "| model | card | free RAM | tokens a step | settings | takes |",
        "|---|---|---|---|---|---|",
    ]
    for each in made:
        if each.found is None:
            continue
        estimate = each.found.best.estimate
        ram = each.found.ram_bytes // GIB
        taken = as_size(estimate.gpu_bytes + each.found.context_bytes, 1), as_size(estimate.host_bytes, 1)
        lines.append(
            f"| [{each.model}]({each.file}) | {each.card} GB | {ram} GB | {each.found.tokens:,} | "
            f"{name_of(each.found.best)} | {taken[0]} GPU, {taken[1]} host |"
        )
    lines += ["", "These do not fit:", "", "| model | card | why |", "|---|---|---|"]
    lines += [f"| {each.model} | {each.card} GB | {each.reason} |" for each in made if each.found is None]
    return "\n".join(lines) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    FOLDER.mkdir(exist_ok=True)
    made = []
    for each in recipes():
        made.append(each)
        if each.found is not None:
            (FOLDER / each.file).write_text(recipe(each.model, each.found))
        print(f"{each.file}: {name_of(each.found.best) if each.found else each.reason}", flush=True)
    kept = {each.file for each in made if each.found is not None}
    for file in FOLDER.glob("*.toml"):
        if file.name not in kept:
            file.unlink()
    (FOLDER / "README.md").write_text(overview(made))


if __name__ == "__main__":
    main()
