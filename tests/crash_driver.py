"""Kills a save at every disk call it makes and checks what is left. One process; each kill hits a fork of it.

Prints one JSON object. Run by tests/test_checkpoint_crash.py.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tests.disk_faults import count_calls, killed_at

from hybridtrainer.checkpoint import CheckpointStore, read_checkpoint, write_checkpoint
from hybridtrainer.errors import CorruptCheckpointError
from hybridtrainer.tree import Tree, fingerprint


def state(step: int) -> dict[str, Tree]:
    return {"w": torch.full((300, 7), float(step)), "m": torch.full((11,), step), "clock": step}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def kill_everywhere(prepare: Callable[[Path], None], save: Callable[[Path], object], load: Callable[[Path], Tree],
                    tidy: Callable[[Path], list[str]]) -> dict[str, object]:  # fmt: skip
    """Kills `save` at every call and moment; `load` must then give the old or the new state."""
    old, new = fingerprint(state(1))["all"], fingerprint(state(2))["all"]
    cases, survivors, problems = 0, {"old": 0, "new": 0}, []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "count"
        prepare(root)
        calls = count_calls(lambda: save(root))
    for number, name in enumerate(calls):
        for moment in ("before", "middle", "after") if name == "write" else ("before", "after"):
            with tempfile.TemporaryDirectory() as scratch:
                root = Path(scratch) / "run"
                prepare(root)
                cases += 1
                where = f"{moment} call {number} ({name})"
                if not killed_at(lambda root=root: save(root), number, moment):  # type: ignore[misc]
                    problems.append(f"{where}: not killed")
                    continue
                try:
                    found = fingerprint(load(root))["all"]
                except CorruptCheckpointError as error:
                    problems.append(f"{where}: {error}")
                    continue
                if found not in (old, new):
                    problems.append(f"{where}: a third state")
                survivors["new" if found == new else "old"] += 1
                problems += [f"{where}: left over {name}" for name in tidy(root)]
    return {"calls": calls, "cases": cases, "survivors": survivors, "problems": problems}


def store(root: Path) -> CheckpointStore:
    return CheckpointStore(root / "checkpoints", keep_last=1)  # so that a save also deletes


def prepare_store(root: Path) -> None:
    root.mkdir()
    store(root).save(state(1), 1)


def load_store(root: Path) -> Tree:
    newest = store(root).newest()
    if newest is None:
        raise CorruptCheckpointError("nothing to load.", "")
    return newest.state()


def tidy_store(root: Path) -> list[str]:
    """What the next start and the next save leave behind besides the newest checkpoint."""
    store(root).sweep()
    last = store(root).save(state(3), 3)
    return [name for name in names(root / "checkpoints") if name != last.name]


def prepare_path(root: Path) -> None:
    root.mkdir()
    write_checkpoint(root / "mine", state(1), 1)


def tidy_path(root: Path) -> list[str]:
    write_checkpoint(root / "mine", state(3), 3)
    for draft in root.glob(".writing-*"):  # of a process that is gone; a new one has another number
        shutil.rmtree(draft)
    return [name for name in names(root) if name != "mine"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = {
        "store": kill_everywhere(prepare_store, lambda root: store(root).save(state(2), 2), load_store, tidy_store),
        "path": kill_everywhere(
            prepare_path,
            lambda root: write_checkpoint(root / "mine", state(2), 2),
            lambda root: read_checkpoint(root / "mine").state(),
            tidy_path,
        ),
    }
    json.dump(result, sys.stdout)
