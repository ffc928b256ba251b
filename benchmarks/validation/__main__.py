"""Runs rows of the validation, each in a process of its own.

python -m benchmarks.validation --text wikitext-2/wiki.train.tokens.xz --tokenizer gpt2-bpe

Without a text the standard library's source is trained on, without a tokenizer its bytes. Rows that are there already
are kept: a run that was broken off goes on with `--missing`. Rows of another seed than 0 have a file of their own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, command, write_result
from benchmarks.validation.rows import ROWS, seed_of, seeded
from benchmarks.validation.train import GIB, train

SEEDS = "seeds"


def result_name(name: str) -> str:
    """The file in which a row is, without its ending."""
    row, seed = seed_of(name)
    return f"validation_{SEEDS if seed else ROWS[row].group.replace(' ', '_')}"


def show(name: str, row: dict[str, Any]) -> str:
    """One line of what came out."""
    reserved, plan = row["reserved_peak_bytes"] or 0, row["plan"].get("gpu_bytes", 0)
    phases = "  ".join(f"{phase} {taken / GIB:.2f}" for phase, taken in row["phase_bytes"].items())
    perplexity = f"{row['perplexity']:9.1f}" if row["perplexity"] else "        -"
    seconds = row["plan"].get("seconds")
    return (
        f"{name:24} loss {row['first_loss']:6.3f} to {row['last_loss']:6.3f}  perplexity {perplexity}  "
        f"reserved {reserved / GIB:6.2f} GiB, planned {plan / GIB:6.2f} ({plan / max(1, reserved) - 1:+6.1%})  "
        f"{1000 * row['seconds_per_step']:7.1f} ms a step, planned {1000 * seconds if seconds else 0:7.1f}  "
        f"{row['divergences']} divergences  in use: {phases}  "
        f"jump {row['jump_bytes'] / GIB:.2f}  {row['jumps'] or ''} {row['memory_settings']}"
    )


def run(name: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """One row, in a child process that has everything imported already and CUDA not yet begun."""
    began = time.perf_counter()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_train_and_tell, args=(name, arguments, there))
    child.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        child.join()
        print(f"{name}: failed with {child.exitcode}", flush=True)
        return None
    child.join()
    print(f"{show(name, found)}  [{time.perf_counter() - began:.0f} s]", flush=True)
    return found


def _train_and_tell(name: str, arguments: argparse.Namespace, there: Connection) -> None:
    row, seed = seed_of(name)
    there.send(train(ROWS[row], _data(arguments), arguments.steps, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--text", help="a text file or folder")
    parser.add_argument("--tokenizer", help="a folder with encoder.json and vocab.bpe")
    parser.add_argument("--steps", type=int, help="instead of each row's own")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--at-once", type=int, default=1, help="rows side by side; their times are worth nothing then")
    parser.add_argument("--missing", action="store_true", help="only rows that have no result yet")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    kept: dict[str, dict[str, Any]] = {}
    asked = [seeded(row, seed) for seed in arguments.seeds for row in arguments.rows]
    names = [name for name in asked if not (arguments.missing and name in _known(name, kept, arguments.out))]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for name, found in zip(names, _in_order(pool, names, arguments), strict=True):
            if found is None:
                continue
            rows = _known(name, kept, arguments.out)
            rows[name] = found | {"made_by": command(), "at_once": arguments.at_once}
            _in_child(write_result, result_name(name), {"rows": rows}, arguments.out)


def _in_child(work: Callable[..., Any], *given: Any) -> None:
    """Does what begins CUDA, after which no child that uses it could be made."""
    child = multiprocessing.get_context("fork").Process(target=work, args=given)
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(f"{work.__name__} failed with {child.exitcode}")


def _in_order(
    pool: ThreadPoolExecutor, names: list[str], arguments: argparse.Namespace
) -> Iterable[dict[str, Any] | None]:
    return pool.map(lambda name: run(name, arguments), names)


def _known(name: str, kept: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Rows of the same file that have a result."""
    file = result_name(name)
    path = folder / f"{file}.json"
    if file not in kept:
        kept[file] = json.loads(path.read_text())["rows"] if path.exists() else {}
    return kept[file]


def _data(arguments: argparse.Namespace) -> dict[str, Any]:
    data: dict[str, Any] = {"source": "text", "path": arguments.text} if arguments.text else {}
    return data | ({"tokenizer": arguments.tokenizer} if arguments.tokenizer else {})


if __name__ == "__main__":
    main()
