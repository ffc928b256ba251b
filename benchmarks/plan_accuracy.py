"""Plans beside what `benchmarks.stream`, `.resident_options` and `.validation` have measured: memory and seconds.

python -m benchmarks.plan_accuracy

Needs no GPU. The link's and the host's speeds are those that were measured beside the runs. Each run's figures are kept
as pairs, planned and measured: GiB of GPU, host and jump, and seconds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RESULTS, write_result
from benchmarks.resident_options import CASES, planned
from benchmarks.stream import newest_rows
from benchmarks.validation.rows import ROWS, seed_of
from hybridtrainer.config_io import parse_config
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.models.gpt import build_gpt, gpt_loss
from hybridtrainer.models.language import language_loss
from hybridtrainer.planning.estimate import Estimate
from hybridtrainer.planning.hardware import H200, Hardware
from hybridtrainer.planning.pieces import rehearse_pieces
from hybridtrainer.planning.rehearsals import Rehearsals
from hybridtrainer.planning.resident import estimate_resident, rehearse_resident
from hybridtrainer.planning.streamed import estimate_streamed
from hybridtrainer.predict.averages import averages_of

GIB = 1 << 30
OLDER_LAUNCH = 50e-6  # of runs from before it was measured beside them: what it was on other machines of the kind
GPT2_TOKENS = 50257  # of the validation's tokenizer
BUSY = 1.2  # times what the host needs: then the GPU is never idle for its sake


def estimate(row: dict[str, Any], hardware: Hardware) -> Estimate:
    """The plan of a run that was measured."""
    case = row["case"]
    memory = MemoryConfig(**case["memory"])
    if not row["kept_weights"] and not row["kept_states"]:
        memory = memory.model_copy(update={"vram": None})  # the engine did not wait, and so kept nothing
    model = build_gpt(case["model"], context=case["context"], device="meta")
    assert memory.mode != "resident" and memory.mode != "auto"  # noqa: PLR1714, PT018
    samples, context = case["tokens"] // case["context"], case["context"]
    pieces = rehearse_pieces(model, memory.mode, samples, context, memory.split, precision=memory.precision)
    return estimate_streamed(pieces, memory, hardware, pack=row.get("packed", False))


def compare(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Planned and measured, with the speeds of link and host of that run."""
    found = estimate(row, replace(H200, **row["link"], launch=_launch(row)))
    return {
        "gpu": (found.gpu_bytes / GIB, row["reserved_peak_bytes"] / GIB),
        "host": (found.host_bytes / GIB, row["host_bytes"] / GIB),
        _waits_for(found): (found.seconds or 0.0, row["seconds_per_step"]),
    }


def fit(rows: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """The two speeds of computing that explain the runs without copies best, each run counting alike.

    Runs that wait for the host say nothing of the GPU's speed.
    """
    waiting = replace(H200, flops=math.inf, memory=math.inf)
    rows = {
        name: row
        for name, row in rows.items()
        if row["seconds_without_copies"]
        > BUSY * (estimate(row, replace(waiting, launch=_launch(row))).compute_seconds or 0.0)
    }
    work = [
        [
            (estimate(row, replace(H200, flops=1.0, memory=math.inf, launch=0.0)).compute_seconds or 0.0) * 1e-12,
            (estimate(row, replace(H200, flops=math.inf, memory=1.0, launch=0.0)).compute_seconds or 0.0) * 1e-12,
        ]
        for row in rows.values()
    ]
    seconds = torch.tensor([[row["seconds_without_copies"]] for row in rows.values()], dtype=torch.float64)
    found = torch.linalg.lstsq(torch.tensor(work, dtype=torch.float64) / seconds, torch.ones_like(seconds)).solution
    per_flop, per_byte = found.flatten().tolist()
    return 1e12 / per_flop, 1e12 / per_byte


def compare_resident(result: dict[str, Any]) -> dict[str, dict[str, tuple[float, float]]]:
    """Planned and measured for each option of a resident model, in which attention was fused."""
    bare = build_gpt(result["model"], context=result["context"], device="meta")
    found = {}
    for name, row in result["rows"].items():
        case = replace(CASES[name], accumulate=row["accumulate"])
        if case.unfused:
            continue
        loss = gpt_loss if case.whole_logits else language_loss
        tokens = result["batch"] * result["context"]
        rehearsals = Rehearsals(bare, tokens, result["context"], case.accumulate, loss)
        plan = planned(case, rehearsals, replace(H200, launch=_launch(result | row)))
        found[name] = {"gpu": (plan.gpu_bytes / GIB, row["reserved_peak_bytes"] / GIB)}
        if "jump" in row["peak_bytes"]:  # whose windows and snapshot, in host memory, are not planned
            found[name]["a jump"] = ((plan.predict_bytes or 0) / GIB, row["peak_bytes"]["jump"] / GIB)
            continue
        # Earlier ones of a process leave up to 0.1 GiB; rows that do not say so had one process for all of a file.
        alone = row.get("alone", name == next(iter(result["rows"])))
        if alone or plan.host_bytes > 2 * plan.host["process"]:
            found[name]["host"] = plan.host_bytes / GIB, row["host_bytes"] / GIB
        if plan.seconds:
            found[name][_waits_for(plan)] = plan.seconds, row["seconds"]
    return found


def compare_validated(row: dict[str, Any], usable: int) -> dict[str, tuple[float, float]]:
    """Planned and measured of a row of `benchmarks.validation`, in which so much of the GPU could be used.

    What a streamed model keeps on the GPU is decided while it runs: its plan is the one that was made then.
    """
    planned_then = {"gpu": (row["plan"]["gpu_bytes"] / GIB, row["reserved_peak_bytes"] / GIB)}
    memory = MemoryConfig.model_validate(row["memory_settings"])
    if memory.mode != "resident":
        return planned_then
    train, model = row["settings"]["train"], row["settings"]["model"]
    samples, micro = train["batch_size"], train.get("accumulate", 1)
    empty = build_gpt(model["name"], vocabulary=GPT2_TOKENS, context=model["context"], device="meta")
    step = rehearse_resident(empty, memory, samples, model["context"], micro)
    config = parse_config({key: value for key, value in row["settings"].items() if key != "data"})
    found = estimate_resident(step, memory=memory, averages=averages_of(empty, config, usable))
    return {"gpu": (found.gpu_bytes / GIB, planned_then["gpu"][1])}


def show(name: str, found: dict[str, tuple[float, float]], columns: tuple[str, ...]) -> str:
    """A row of a table."""
    units = {"seconds": "s", "host's seconds": "s, host"}
    told = ["host's seconds" if key == "seconds" and "host's seconds" in found else key for key in columns]
    cells = [
        f"{found[key][0]:.2f} {units.get(key, 'GiB')} ({found[key][0] / found[key][1] - 1:+.1%}) | {found[key][1]:.2f}"
        if key in found
        else " | "
        for key in told
    ]
    return f"| {name} | {' | '.join(cells)} |"


def told_apart(name: str, others: Container[str]) -> str:
    """The name of a run, where others had the same settings."""
    told = name
    while told in others:
        told += " and again" if told != name else ", again"
    return told


def _waits_for(plan: Estimate) -> str:
    """Whose seconds they are: the host's, whose speed changes while a run is measured, are told apart."""
    return "host's seconds" if plan.waits_for_host else "seconds"


def _launch(row: dict[str, Any]) -> float:
    """The lowest reading: what else a machine does only makes it slower."""
    readings = row.get("launch_readings") or [row.get("launch_seconds") or OLDER_LAUNCH]
    return float(min(readings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resident", type=Path, nargs="*", default=sorted(RESULTS.glob("resident_*.json")))
    parser.add_argument(
        "--validated",
        type=Path,
        nargs="*",
        default=[path for path in sorted(RESULTS.glob("validation_*.json")) if path.stem != "validation_faults"],
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    rows = newest_rows()
    kept: dict[str, dict[str, tuple[float, float]]] = {}
    print("| run | GPU, planned | reserved | host, planned | taken | a step, planned | measured |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        kept[name] = compare(row)
        print(show(name, kept[name], ("gpu", "host", "seconds")), flush=True)
    flops, memory = fit(rows)
    print(f"\nspeeds fitted to these runs: {flops / 1e12:.0f} TFLOP/s, {memory / 1e12:.2f} TB/s")
    print("\n| run | GPU, planned | reserved | host, planned | taken | a step, planned | measured | "
          "a jump, planned | allocated |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for path in arguments.resident:
        result = json.loads(path.read_text())
        shape = f"{result['model']}, {result['batch']} x {result['context']}"
        for name, found in compare_resident(result).items():
            told = told_apart(f"{shape}: {name}", kept)
            kept[told] = found
            print(show(told, found, ("gpu", "host", "seconds", "a jump")), flush=True)
    print("\n| run of the validation | GPU, planned | reserved |\n|---|---|---|")
    validated: dict[str, dict[str, tuple[float, float]]] = {}
    for path in arguments.validated:
        measured = json.loads(path.read_text())
        whole = measured["environment"]["gpus"][0]["memory_bytes"]
        for name, row in measured["rows"].items():
            card = ROWS[seed_of(name)[0]].card
            validated[name] = compare_validated(row, whole if card is None else card * GIB)
            print(show(name, validated[name], ("gpu",)), flush=True)
    content = {"runs": kept, "validated": validated}
    print(f"written to {write_result('plan_accuracy', content, arguments.out)}")


if __name__ == "__main__":
    main()
