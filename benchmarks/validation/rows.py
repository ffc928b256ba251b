"""What is validated: one row for each model, card and way of training.

A row is a configuration of `hybridtrainer train`; where it says nothing of memory but the card, the planner chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        group: Whose table it is in.
        settings: Of the run, by section.
        card: Memory of the card that is imitated, in GB; None for all there is.
        promise: GiB that torch may reserve at most; None where nothing was promised.
        predict_promise: GiB in use at most while a jump is tried.
        plain: The row that this one must not be worse than.
    """

    group: str
    settings: Settings
    card: int | None = None
    promise: float | None = None
    predict_promise: float | None = None
    plain: str | None = None


def seeded(row: str, seed: int) -> str:
    """What a row is called that was trained with another seed.

    >>> seeded("124m plain", 0), seeded("124m plain", 2), seed_of("124m plain, seed 2")
    ('124m plain', '124m plain, seed 2', ('124m plain', 2))
    """
    return f"{row}, seed {seed}" if seed else row


def seed_of(name: str) -> tuple[str, int]:
    """The row that a name is of, and the seed."""
    row, _, seed = name.partition(", seed ")
    return row, int(seed or 0)


def merged(*parts: Settings) -> dict[str, Any]:
    """Sections of all parts; what comes later wins."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, Mapping) else value
    return found


def _model(
    name: str, context: int, batch: int, steps: int, rate: float, warmup: int = 50, evaluated: int = 16
) -> Settings:
    return {
        "model": {"name": name, "context": context},
        "train": {
            "batch_size": batch,
            "steps": steps,
            "eval_interval": max(10, steps // 20),
            "eval_batches": evaluated,
        },
        "optimizer": {"lr": rate},
        "schedule": {"warmup_steps": warmup},
    }


OFF: Settings = {"predict": "off"}
COSINE: Settings = {"schedule": {"name": "cosine"}}
CONSERVATIVE: Settings = {"preset": "conservative", "predict": ["jumps"]}
AGGRESSIVE: Settings = {"preset": "aggressive", "predict": ["jumps"]}
# Jumps as often as can be: what is looked at is memory, phase by phase.
EAGER: Settings = {
    "predict": ["jumps"], "warmup_steps": 10, "full_steps": 6, "correct_steps": 2, "confidence_threshold": 0.0,
    "waste_limit": 1.0, "lasting_share": 1.0, "recovery_steps": 2, "max_failures": 1000, "history_windows": 4,
}  # fmt: skip
LEAN: Settings = {
    "memory": {
        "precision": "bf16", "checkpoint_every": 1, "optimizer_bits": 8, "predict_int8": True,
        "predict_states": "leave",
    },
    "train": {"accumulate": 4},
}  # fmt: skip


def _memory(**settings: Any) -> Settings:
    return {"memory": settings}


BF16 = _memory(precision="bf16")
GPT2 = _model("gpt2-124m", 512, 8, 1000, 5e-4)
MEDIUM = _model("gpt2-350m", 512, 8, 200, 3e-4)
XL = _model("gpt2-1.5b", 1024, 4, 50, 6e-5, 10, 4)
BILLION = _model("llama-1b", 1024, 4, 50, 1e-4, 10, 4)
SEVEN = _model("llama-7b", 2048, 2, 50, 2e-5, 10, 2)
FIFTY = _model("llama-50b", 2048, 2, 20, 1e-5, 5, 1)


def _card(size: int) -> Settings:
    return _memory(vram=f"{size}GB")


def _micro(settings: Settings, batch: int) -> Settings:
    """Four micro-batches that make one step of as many samples, evaluated on as many."""
    evaluated = 4 * settings["train"]["eval_batches"]
    return merged(settings, {"train": {"batch_size": batch // 4, "accumulate": 4, "eval_batches": evaluated}})


ROWS: dict[str, Row] = {
    "124m plain": Row("124m", merged(GPT2, BF16, OFF)),
    "124m conservative": Row("124m", merged(GPT2, BF16, CONSERVATIVE), plain="124m plain"),
    "124m aggressive": Row("124m", merged(GPT2, BF16, AGGRESSIVE), plain="124m plain"),
    "124m cosine": Row("124m", merged(GPT2, BF16, OFF, COSINE)),
    "124m auto": Row("124m", merged(GPT2, BF16, COSINE), plain="124m cosine"),
    "124m fp32": Row("124m options", merged(GPT2, OFF), promise=5.0),
    "124m checkpointing": Row(
        "124m options", merged(GPT2, _memory(precision="bf16", checkpoint_every=1), OFF), plain="124m plain"
    ),
    "124m 4 micro-batches": Row("124m options", _micro(merged(GPT2, BF16, OFF), 8), plain="124m plain"),
    "124m offload": Row(
        "124m options", merged(GPT2, _memory(precision="bf16", offload_activations=True), OFF), plain="124m plain"
    ),
    "124m 8-bit moments": Row(
        "124m options", merged(GPT2, _memory(precision="bf16", optimizer_bits=8), OFF), plain="124m plain"
    ),
    "124m 4-bit moments": Row(
        "124m options", merged(GPT2, _memory(precision="bf16", optimizer_bits=4), OFF), plain="124m plain"
    ),
    "124m streamed": Row("124m options", merged(GPT2, _memory(mode="split8", vram="4GB"), OFF), plain="124m plain"),
    "124m all": Row("124m options", _micro(merged(GPT2, LEAN, AGGRESSIVE), 8), predict_promise=1.0, plain="124m plain"),
    "124m 4 GB": Row("124m options", merged(GPT2, _card(4), OFF), card=4, promise=4.0, plain="124m plain"),
    "350m plain": Row("350m", merged(MEDIUM, BF16, OFF)),
    "350m aggressive": Row("350m", merged(MEDIUM, BF16, AGGRESSIVE), plain="350m plain"),
    "350m all, resident": Row("350m", _micro(merged(MEDIUM, LEAN, AGGRESSIVE), 8), plain="350m plain"),
    "350m all, streamed": Row(
        "350m", merged(MEDIUM, _memory(mode="split8", vram="2GB"), AGGRESSIVE), 2, 2.0, plain="350m plain"
    ),
    "1.5b 8 GB": Row("1.5b", merged(XL, _card(8), EAGER), 8, 8.0),
    "1.5b 4 GB": Row("1.5b", merged(XL, _card(4), OFF), 4, 4.0),
    "llama-1b 16 GB": Row("1.5b", merged(BILLION, _card(16), EAGER), 16, 14.0),
    "llama-1b 16 GB, 1000 steps": Row(
        "1b long", merged(BILLION, _card(16), AGGRESSIVE, {"train": {"steps": 1000, "eval_interval": 100}}), 16, 14.0
    ),
    **{f"7b {card} GB": Row("7b", merged(SEVEN, _card(card), OFF), card, card) for card in (24, 16, 12, 8)},
    "50b 24 GB": Row("50b", merged(FIFTY, _card(24), OFF), 24, 24.0),
    "50b 16 GB": Row("50b", merged(FIFTY, _card(16), OFF), 16, 14.0),
}
