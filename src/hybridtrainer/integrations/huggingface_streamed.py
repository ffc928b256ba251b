"""Streamed models in Hugging Face's folders and in its Trainer: loaded, checked and saved without a second copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.errors import ModelError
from hybridtrainer.integrations.optional import require
from hybridtrainer.memory.load import load_weights_
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.save import save_weights
from hybridtrainer.memory.stream import stream


def is_streamed(model: nn.Module) -> bool:
    """Whether `stream` has been called on the model."""
    return isinstance(getattr(model, "optimizer", None), StreamedOptimizer)


def stream_pretrained(
    folder: str | Path, memory: MemoryConfig, device: str | torch.device = "cuda", **options: Any
) -> nn.Module:
    """A causal language model from a Hugging Face folder, streamed; its weights are in memory once.

    Args:
        folder: With `config.json` and safetensors files.
        memory: As for `stream`.
        device: As for `stream`.
        options: As for `stream`.

    Raises:
        MissingPackageError: if transformers or accelerate is not installed.
        ModelError: if the files do not fit the configuration, or the model cannot be streamed.
    """
    transformers, accelerate = require("transformers", "hf"), require("accelerate", "hf")
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"There is no config.json in {folder}.", "Name a folder that `save_pretrained` has written.")
    config = transformers.AutoConfig.from_pretrained(str(folder))
    with accelerate.init_empty_weights(include_buffers=False):  # buffers are small, and not in the files
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    made: nn.Module = stream(model, memory, device, **options)
    load_weights_(made, folder)
    return made


def save_pretrained(model: nn.Module, folder: str | Path, instead: Mapping[int, nn.Parameter] | None = None) -> None:
    """Writes a streamed model as a folder that `from_pretrained` reads.

    Args:
        model: The model.
        folder: Made if it is not there.
        instead: As for `save_weights`.

    Raises:
        SaveError: if the disk is full, read-only or failing.
        TornStepError: if a step has failed half-way.
    """
    save_weights(model, folder, instead=instead)
    for name in ("config", "generation_config"):
        part = copy(getattr(model, name, None))
        if part is not None:
            if name == "config":  # what was written, whatever the folder was read from
                part.dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
            part.save_pretrained(str(folder))


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters on the model."""
    return hasattr(model, "peft_config")


def adapters_of(model: Any, instead: Mapping[int, nn.Parameter]) -> dict[str, Tensor]:
    """Copies of what is trained of a streamed model with adapters, for PEFT to write.

    Args:
        model: The model.
        instead: As for `save_weights`.

    Raises:
        TornStepError: if a step has failed half-way.
    """
    model.optimizer.settle_whole()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return {name: instead.get(id(each), each).detach().clone() for name, each in trained.items()}


@contextmanager
def written_by_tensors(model: Any, instead: Mapping[int, nn.Parameter]) -> Iterator[dict[str, Tensor] | None]:
    """While open, `save_pretrained` of a streamed model writes it without a second copy; of others nothing changes.

    Args:
        model: Streamed or not.
        instead: As for `save_weights`.

    Yields:
        What to write where that is not the whole model: adapters.
    """
    whole = is_streamed(model) and not has_adapters(model)
    if whole:
        model.save_pretrained = lambda folder, **_: save_pretrained(model, folder, instead)
    try:
        yield adapters_of(model, instead) if is_streamed(model) and not whole else None
    finally:
        if whole:
            del model.save_pretrained


def load_adapters_(model: Any, folder: str | Path) -> None:
    """Reads the adapters that PEFT has written into a streamed model.

    Raises:
        ModelError: if there are none.
    """
    file = Path(folder) / "adapter_model.safetensors"
    if not file.is_file():
        raise ModelError(f"There is no {file.name} in {folder}.", "Name a folder that PEFT has written.")
    require("peft", "hf").set_peft_model_state_dict(model, load_file(file))
    model.optimizer.forget()


def require_same_settings(args: Any, optimizer: StreamedOptimizer) -> None:
    """Refuses arguments that differ from what the model was streamed with: neither is ignored.

    Raises:
        ModelError: naming the first of them.
    """
    wanted = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    for group in optimizer.param_groups:
        for name, value in wanted.items():
            found = group.get(f"initial_{name}", group[name])
            if tuple(found) != value if isinstance(value, tuple) else float(found) != value:
                raise ModelError(
                    f"The model was streamed with {name}={found}, and the training arguments say {value}.",
                    "Give both the same; AdamW of a streamed model is made by `stream`.",
                )
    decays = {float(group["weight_decay"]) for group in optimizer.param_groups}
    if float(args.weight_decay) not in decays:
        raise ModelError(
            f"The model was streamed with weight_decay={sorted(decays)}, and the training arguments say "
            f"{args.weight_decay}.",
            "Give both the same; parameters without decay are named by `param_groups` of `stream`.",
        )
