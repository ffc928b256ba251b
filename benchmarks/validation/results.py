"""What the validation has measured, read from its result files."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from benchmarks.record import RESULTS, gib, result
from benchmarks.validation.rows import ROWS, seed_of, seeded

Measured = dict[str, Any]
LATE = (900, 1000)  # steps of which the training losses of options are compared


def group(name: str) -> dict[str, Measured]:
    """The rows of a group."""
    found: dict[str, Measured] = result(f"validation_{name}")["rows"]
    return found


def everything() -> dict[str, Measured]:
    """All rows of all groups, by name."""
    names = sorted(path.stem for path in RESULTS.glob("validation_*.json") if path.stem != "validation_faults")
    return {name: row for each in names for name, row in result(each)["rows"].items()}


def reserved(row: Measured) -> float:
    """The most that torch took of the card, in GiB."""
    return gib(row["reserved_peak_bytes"])


def plan_error(row: Measured) -> float:
    """What the plan of the day was off by, as a share."""
    return float(row["plan"]["gpu_bytes"] / row["reserved_peak_bytes"] - 1)


def perplexity_at(row: Measured, step: int) -> float:
    """Of the evaluation at a step, or at the last one before it."""
    return math.exp([each["loss"] for each in row["evaluations"] if each["step"] <= step][-1])


def against_plain(name: str, row: Measured) -> float | None:
    """By how much perplexity is above that of the plain run after as many steps, as a share."""
    own, seed = seed_of(name)
    plain = seeded(ROWS[own].plain or "", seed) if own in ROWS else ""
    if plain not in everything() or not row.get("evaluations") or evaluated(row) != evaluated(everything()[plain]):
        return None
    last = int(row["evaluations"][-1]["step"])
    return float(row["perplexity"] / perplexity_at(everything()[plain], last) - 1)


def by_seed(name: str) -> list[Measured]:
    """A row and those of its other seeds, in their order."""
    seeds = sorted(seed for row, seed in map(seed_of, everything()) if row == name)
    return [everything()[seeded(name, seed)] for seed in seeds]


def differences(name: str) -> list[float]:
    """Of every seed of a row, by how much its perplexity is above that of the plain run of the same seed."""
    found = [against_plain(seeded(name, row["settings"]["seed"]), row) for row in by_seed(name)]
    return [each for each in found if each is not None]


def net_cost(row: Measured) -> float:
    """What jumps took, less what the steps that they stood for would have taken, as a share of the run."""
    told = row["statistics"]
    predict = told["seconds_by_phase"]["predict"]
    real = (told["seconds"] - predict) / told["real_steps"]
    return float((predict - told["foreseen_steps"] * real) / told["seconds"])


def plans_now() -> dict[str, float]:
    """What the plan of each row is off by as plans are counted now, as a share."""
    plans = result("plan_accuracy")["validated"]
    return {name: abs(row["gpu"][0] / row["gpu"][1] - 1) for name, row in plans.items()}


def evaluated(row: Measured) -> int:
    """On how many samples; on fewer it is another part of the text."""
    train = row["settings"]["train"]
    return int(train["batch_size"] * train["eval_batches"])


def training_loss(row: Measured, begin: int, end: int) -> float:
    """The mean over steps after `begin` up to `end`."""
    return fmean(loss for step, loss in row["curve"] if begin < step <= end)


def seconds_to(row: Measured, loss: float) -> float:
    """Training time after which the validation loss is at `loss` and stays there, between evaluations by a line."""
    points = [(each["seconds"], each["loss"]) for each in row["evaluations"]]
    last_above = max(at for at, (_, value) in enumerate(points) if value > loss)
    (before, high), (after, low) = points[last_above : last_above + 2]
    return float(before + (after - before) * (high - loss) / (high - low))


def validated_speed() -> float:
    """How many times as fast as plain training's the 124M's last loss is reached with auto."""
    plain, auto = group("124m")["124m cosine"], group("124m")["124m auto"]
    last = plain["evaluations"][-1]
    return float(last["seconds"] / seconds_to(auto, last["loss"]))
