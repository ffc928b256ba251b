"""Tasks by name: settings whose plain arm was tuned, so that whoever beats it has beaten something.

`hybridtrainer train fashion-mnist` and `hybridtrainer compare fashion-mnist` start from these; files and `--set`
change what they like. `python -m benchmarks.tune_tasks` made the learning rates, schedules and lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NamedTask:
    """A task that can be asked for by name.

    Attributes:
        about: What it is, in a few words.
        settings: Where they differ from the defaults.
        target: The accuracy that others report on it; None where the plain arm's own median is the target.
    """

    about: str
    settings: dict[str, Any]
    target: float | None = None


def _images(model: str, lr: float, schedule: str, steps: int) -> dict[str, Any]:
    """The small conv nets of the weight-forecasting literature: batch 128, AdamW, every test image evaluated."""
    return {
        "model": {"name": model},
        "data": {"source": "idx"},
        "optimizer": {"name": "adamw", "lr": lr, "weight_decay": 0.0, "betas": [0.9, 0.999]},
        "schedule": {"name": schedule, "warmup_steps": 0},
        "train": {"steps": steps, "batch_size": 128, "clip_norm": 0, "eval_batches": 79, "eval_interval": steps // 50},
    }


_GPT: dict[str, Any] = {
    "preset": "conservative",
    "model": {"name": "nano"},
    "data": {"probe_batches": 1},
    "optimizer": {"name": "adamw", "lr": 4e-3},
    "schedule": {"name": "cosine", "warmup_steps": 50},
    "train": {"steps": 600, "batch_size": 16, "eval_batches": 8, "eval_interval": 12},
}

NAMED_TASKS: dict[str, NamedTask] = {
    "digits": NamedTask(
        "1,797 handwritten digits, 8x8, a conv net of 16-32-32 (comes with scikit-learn, extra demo)",
        {
            "model": {"name": "cnn-small"},
            "data": {"source": "digits", "validation_share": 0.2},
            "optimizer": {"name": "adamw", "lr": 4e-3, "weight_decay": 0.0},
            "schedule": {"name": "cosine", "warmup_steps": 0},
            "train": {"steps": 600, "batch_size": 32, "eval_batches": 12, "eval_interval": 12},
        },
    ),
    "stdlib-gpt": NamedTask("a byte-level GPT on the source of Python's own library (built in)", _GPT),
    "mnist": NamedTask(
        "MNIST from idx files, a conv net of 32-64-64", _images("cnn", 3e-3, "constant", 8000), target=0.99
    ),
    "fashion-mnist": NamedTask(
        "Fashion-MNIST from idx files, a conv net of 32-64-64", _images("cnn", 6e-3, "constant", 6000), target=0.905
    ),
    "fashion-mnist-small": NamedTask(
        "Fashion-MNIST from idx files, a conv net of 16-32-32",
        _images("cnn-small", 6e-3, "constant", 10_000),
        target=0.895,
    ),
    "text": NamedTask(
        "a byte-level GPT on any text file or folder", _GPT | {"data": {"source": "text", "probe_batches": 1}}
    ),
}
