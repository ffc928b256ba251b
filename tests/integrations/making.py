"""Small real models and texts in the shapes of other people's libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.support import EAGER, text_splits
from torch import Tensor, nn

from hybridtrainer.observe.runlog import read_log

TIMES = {"seconds", "training_seconds", "mean_seconds", "worth"}
PHASES = {"warmup", "full", "predict", "correct"}
ALL_PHASES: dict[str, Any] = EAGER | {"max_failures": 1000}


def windows(count: int, first: int = 0) -> list[dict[str, Tensor]]:
    """Pieces of the standard library's source, as a causal language model of Hugging Face wants them."""
    data = text_splits().train
    pieces = [data[97 * (first + number) % len(data)] for number in range(count)]
    return [{"input_ids": piece, "labels": piece.clone()} for piece in pieces]


def tiny(kind: str = "gpt2", seed: int = 0, dropout: float = 0.1, **changes: Any) -> Any:
    """A causal language model of Hugging Face with two small blocks."""
    import transformers

    torch.manual_seed(seed)
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256}
        drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes | drops | ends | changes)))
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64, "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip
    name = {"llama": "Llama", "qwen2": "Qwen2"}[kind]
    config = getattr(transformers, f"{name}Config")(**(sizes | changes))
    return getattr(transformers, f"{name}ForCausalLM")(config)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def log_of(folder: Path) -> list[dict[str, Any]]:
    return read_log(folder / "log.jsonl")


def timeless(records: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    """Records of these kinds without what differs from one time to the next."""
    return [
        {name: value for name, value in record.items() if name not in TIMES}
        for record in records
        if record["kind"] in kinds
    ]


def phases_in(records: list[dict[str, Any]]) -> set[str]:
    return {record["phase"] for record in records if record["kind"] == "step"}


def statistics(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "statistics.json").read_text())
    return found
