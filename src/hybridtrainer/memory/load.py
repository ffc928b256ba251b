"""Fills a streamed model from safetensors files, tensor by tensor, straight to where its weights live.

There is never a second copy of the model in memory: each tensor is read, written and freed. Names and shapes are
checked before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.state import Streamed


@torch.no_grad()
def load_weights_(model: nn.Module, path: str | Path) -> None:
    """Reads the weights of a model, streamed or not, from a safetensors file or a folder of them.

    Args:
        model: Its parameter names must be those in the files, as Hugging Face writes them.
        path: A file, or a folder with `*.safetensors`.

    Raises:
        ModelError: if there is no such file, or names or shapes do not fit. Nothing was written then.
    """
    files = _files(Path(path))
    parameters = _by_every_name(model)
    with ExitStack() as stack:
        homes = _open(files, stack)
        _check(parameters, homes, str(path))
        optimizer = getattr(model, "optimizer", None)
        if isinstance(optimizer, Streamed):
            optimizer.forget()
        for name, file in homes.items():
            _write(parameters[name], file.get_tensor(name))


def _files(path: Path) -> list[Path]:
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not found:
        raise ModelError(f"There are no weights at {path}.", "Name a safetensors file, or a folder that has some.")
    return found


def _open(files: list[Path], stack: ExitStack) -> dict[str, Any]:
    homes: dict[str, Any] = {}
    for path in files:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}.", "Download or copy it again.") from error
        homes |= dict.fromkeys(file.keys(), file)
    return homes


def _by_every_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters under all their names: a tied one may be in a file under any of them."""
    return dict(model.named_parameters(remove_duplicate=False))


def _check(parameters: Mapping[str, nn.Parameter], homes: Mapping[str, Any], origin: str) -> None:
    unknown = [name for name in homes if name not in parameters]
    given = {id(parameters[name]) for name in homes if name in parameters}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in given]
    wrong = [
        f"{name} is {tuple(homes[name].get_slice(name).get_shape())} there and {tuple(parameter.shape)} here"
        for name, parameter in parameters.items()
        if name in homes and tuple(homes[name].get_slice(name).get_shape()) != tuple(parameter.shape)
    ]
    problems = [f"it lacks {name}" for name in missing] + [f"it has {name}, which is not here" for name in unknown]
    problems += wrong
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise ModelError(
            f"The weights at {origin} do not fit the model: {shown}. Nothing was written.",
            "Build the model from the configuration that belongs to them.",
        )


def _write(parameter: nn.Parameter, values: Tensor) -> None:
    home = getattr(parameter, "home", None)
    if home is None:
        parameter.copy_(values)
    else:
        home.write_(values.reshape(-1).float())
