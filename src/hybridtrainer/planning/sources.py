"""The model that a plan is for, without its memory: one of ours by name, or a configuration file of Hugging Face."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridtrainer import disk
from hybridtrainer.config_problems import closest, shorten
from hybridtrainer.errors import ModelError
from hybridtrainer.models.gpt import GPT_CONFIGS, build_gpt
from hybridtrainer.models.language import head_of

DECODERS = "Give the configuration of a causal decoder, such as Llama, Mistral, Qwen2 or GPT-2."
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
MOST_LAYERS = 256  # a rehearsal goes through all of them
LONGEST = 200  # characters of what transformers says, which may name every model that it knows


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
    if not is_there(source):
        raise ModelError(*not_there(source))
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    model = _from_hugging_face(path)
    _check_positions(model, path, context)
    return model


def remarks_on(source: str, model: nn.Module) -> tuple[str, ...]:
    """What to know of the plan of a model from a file: what the file does not say, and what of it is not counted.

    >>> remarks_on("gpt2-1.5b", load_without_memory("gpt2-1.5b", 1024))
    ()
    """
    if source in GPT_CONFIGS:
        return ()
    path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    settings, config = _read(path), model.config
    missing = [
        f"{name} = {getattr(config, name)}"
        for name in SIZES
        if getattr(config, name, None) is not None and not {name, _key(config, name)} & settings.keys()
    ]
    found = [f"{path} does not give {', '.join(missing)}: these are defaults of transformers."] if missing else []
    if settings.get("quantization_config"):
        found.append("`quantization_config` is not counted: the plan is for weights without it, all of them trained.")
    return tuple(found)


def _check_positions(model: nn.Module, path: Path, context: int) -> None:
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and context > positions:
        key = _key(config, "max_position_embeddings")
        raise ModelError(
            f"{path} describes a model of {positions} positions, and sequences have {context} tokens.",
            f"Give --seq {positions} or less, or raise `{key}` in the file.",
        )


def _check_layers(config: Any, path: Path) -> None:
    """Before they are built."""
    layers, key = getattr(config, "num_hidden_layers", None), _key(config, "num_hidden_layers")
    if not isinstance(layers, int) or 2 <= layers <= MOST_LAYERS:
        return
    why = "No repeated blocks" if layers < 2 else f"more than the {MOST_LAYERS} layers that can be planned for"
    raise ModelError(
        f"{path} cannot be planned: {why}, `{key}` is {layers}.",
        f"Give a model of 2 to {MOST_LAYERS} layers.",
    )


def _key(config: Any, name: str) -> str:
    """What a kind of model calls a setting in its file: `n_positions` in GPT-2."""
    return str(getattr(type(config), "attribute_map", {}).get(name, name))


def is_there(source: str) -> bool:
    """Whether there is a model, a file or a folder with one of that name."""
    path = Path(source)
    try:
        return source in GPT_CONFIGS or (path / "config.json" if path.is_dir() else path).exists()
    except (OSError, ValueError):  # a name that is too long, or that no file can have
        return False


def not_there(source: str) -> tuple[str, str]:
    """What to say of a name that is not known, and what to do."""
    known = f"Give a config.json of Hugging Face, or one of: {', '.join(GPT_CONFIGS)}."
    if _is_folder(source):
        return f"The folder {shorten(source)} has no config.json.", known
    meant = closest(source, GPT_CONFIGS)
    return f"There is no model and no file named {shorten(source)}.", f"{meant} {known}" if meant else known


def _is_folder(source: str) -> bool:
    try:
        return bool(source) and Path(source).is_dir()
    except (OSError, ValueError):
        return False


def _from_hugging_face(path: Path) -> nn.Module:
    settings = _read(path)
    kind = str(settings["model_type"])
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            "Reading a configuration of Hugging Face needs transformers, which is not installed.",
            'Install it: pip install ".[hf]".',
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(**{**settings, "model_type": kind})
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(f"{path} describes {kind}, an encoder with a decoder, not a causal decoder.", DECODERS)
        _check_layers(config, path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
        if not isinstance(model, nn.Module):
            raise ModelError(f"{path} gives no torch model.", DECODERS)
        head_of(model)
    except ModelError as error:
        if error.what.startswith(str(path)):
            raise
        raise ModelError(f"{path} cannot be planned: {error.what}", DECODERS) from error
    except Exception as error:  # whatever transformers does with what it is given
        why = _first_words(error)
        raise ModelError(
            f"transformers cannot build a causal decoder of {kind!r} from {path}: {why}.",
            f"Correct the file. {DECODERS}",
        ) from error
    return model


def _first_words(error: Exception) -> str:
    """The first line, and those that follow as long as a colon announces them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = next((index for index, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: last + 1])[:LONGEST].rstrip(".:") or type(error).__name__


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(disk.read_small(path))
    except OSError as error:
        why = f"it cannot be read, {error.strerror}"
    except (ValueError, RecursionError):  # also what is no UTF-8
        why = "it holds no JSON"
    else:
        if isinstance(settings, dict) and "model_type" in settings:
            return settings
        why = "it has no `model_type`"
    raise ModelError(f"{path} is no configuration of a model: {why}.", "Give a config.json that has a `model_type`.")
