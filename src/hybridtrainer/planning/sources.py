"""The model that a plan is for, without its memory: one of ours by name, or a configuration file of Hugging Face."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
from torch import nn

from hybridtrainer.errors import ModelError
from hybridtrainer.models.gpt import GPT_CONFIGS, build_gpt


def load_without_memory(source: str, context: int) -> nn.Module:
    """A decoder on the meta device.

    Args:
        source: A name such as "llama-7b", a config.json of Hugging Face, or a folder with one.
        context: Tokens in one sequence.

    Raises:
        ModelError: for an unknown name, a file that is no configuration, or one of no causal decoder.

    >>> model = load_without_memory("gpt2-1.5b", 1024)
    >>> next(model.parameters()).device.type
    'meta'
    """
    if source in GPT_CONFIGS:
        return build_gpt(source, context=context, device="meta")
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise ModelError(
            f"There is no model and no file named {source!r}.",
            f"Give a config.json of Hugging Face, or one of: {', '.join(GPT_CONFIGS)}.",
        )
    model = _from_hugging_face(path)
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and context > positions:
        raise ModelError(
            f"{path} describes a model of {positions} positions, and sequences have {context} tokens.",
            f"Give --seq {positions} or less, or raise `max_position_embeddings` in the file.",
        )
    return model


def _from_hugging_face(path: Path) -> nn.Module:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        kind = settings["model_type"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} is no configuration of a model: {error!r}.", "Give a config.json that has a `model_type`."
        ) from error
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            "Reading a configuration of Hugging Face needs transformers, which is not installed.",
            'Install it: pip install "hybridtrainer[hf]".',
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(**{"model_type": kind, **settings})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ModelError(
            f"transformers cannot build a causal decoder from {path}: {error}", "Check the file and the version."
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{path} gives no torch model.", "Give the configuration of a causal decoder.")
    return model
