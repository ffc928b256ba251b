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

OLD_BUFFERS = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
"""Masks and frequencies that Hugging Face once wrote into files, and that its models now make for themselves."""


@torch.no_grad()
def load_weights_(model: nn.Module, path: str | Path) -> None:
    """Reads the weights of a model, streamed or not, from a safetensors file or a folder of them.

    Args:
        model: Its parameter names must be those in the files, as Hugging Face writes them. Some files have the names of
            the model without its head (`h.0.ln_1.weight` for `transformer.h.0.ln_1.weight`), and some have buffers
            that models make for themselves.
        path: A file, or a folder with `*.safetensors`.

    Raises:
        ModelError: if there is no such file, or names or shapes do not fit. Nothing was written then.
    """
    files = _files(Path(path))
    parameters = _by_every_name(model)
    with ExitStack() as stack:
        found = _open(files, stack)
        names = _names_here(model, parameters, found)
        kept = {here: there for there, here in names.items() if here not in parameters and here in _kept_buffers(model)}
        homes = {here: (there, found[there]) for there, here in names.items() if here not in kept}
        _check(parameters, homes, str(path))
        optimizer = getattr(model, "optimizer", None)
        if isinstance(optimizer, Streamed):
            optimizer.forget()
        for here, (there, file) in homes.items():
            _write(parameters[here], file.get_tensor(there))
        for here, there in kept.items():
            model.get_buffer(here).copy_(found[there].get_tensor(there))


def _names_here(model: nn.Module, parameters: Mapping[str, Tensor], found: Mapping[str, Any]) -> dict[str, str]:
    """For each name in the files that of the model; buffers which it makes for itself are left out."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    made = {name for name, _ in model.named_buffers()} - _kept_buffers(model)
    known = parameters.keys() | _kept_buffers(model) | made
    names: dict[str, str] = {}
    for there in found:
        here = next((each for each in (there, prefix + there) if each in known), there)
        is_old = there.endswith(OLD_BUFFERS) and here not in known
        if here not in made and not is_old:
            names[there] = here
    return names


def _kept_buffers(model: nn.Module) -> set[str]:
    """Those that belong into a file."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


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


def _check(parameters: Mapping[str, nn.Parameter], homes: Mapping[str, tuple[str, Any]], origin: str) -> None:
    unknown = [there for here, (there, _) in homes.items() if here not in parameters]
    given = {id(parameters[name]) for name in homes if name in parameters}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in given]
    shapes = {here: tuple(file.get_slice(there).get_shape()) for here, (there, file) in homes.items()}
    wrong = [
        f"{name} is {shapes[name]} there and {tuple(parameter.shape)} here"
        for name, parameter in parameters.items()
        if name in shapes and shapes[name] != tuple(parameter.shape)
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
