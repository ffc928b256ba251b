"""Writes a model's weights as safetensors files in Hugging Face's naming, tensor by tensor.

There is never a second copy of the model in memory. Weights that are tied are written once, under their first name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from hybridtrainer import disk
from hybridtrainer.errors import SaveError
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.tensor_file import safetensors_bytes

SHARD_BYTES = 5 * 10**9
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = {"format": "pt"}  # without it Hugging Face does not read a file


def save_weights(
    model: nn.Module,
    folder: str | Path,
    shard_bytes: int = SHARD_BYTES,
    instead: Mapping[int, nn.Parameter] | None = None,
) -> list[Path]:
    """Writes the weights of a model, streamed or not; those that are there are replaced.

    Args:
        model: Its parameters are written in the type in which it computes with them, its persistent buffers too.
        folder: Made if it is not there.
        shard_bytes: Largest size of a file; a tensor that is larger has a file of its own.
        instead: By `id` the parameters in whose place others are written.

    Returns:
        The files: one, or several and an index.

    Raises:
        SaveError: if the disk is full, read-only or failing.
        TornStepError: if a step of a streamed model has failed half-way.
    """
    folder = Path(folder)
    if isinstance(optimizer := getattr(model, "optimizer", None), StreamedOptimizer):
        optimizer.settle_whole()
    shards = list(_shards(_tensors(model, instead or {}), shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            draft = folder / f".{name}.draft"
            draft.unlink(missing_ok=True)
            disk.write_durably(draft, safetensors_bytes(shard, METADATA))
            disk.rename_durably(draft, folder / name)
        written = [folder / name for name in names]
        if len(shards) > 1:
            written.append(_write_index(folder, dict(zip(names, shards, strict=True))))
        _remove_others(folder, {path.name for path in written})
    except OSError as error:
        raise SaveError(
            f"The weights were not written to {folder}: {error.strerror or error}.",
            "Free some space or choose another folder.",
        ) from error
    return written


def _tensors(model: nn.Module, instead: Mapping[int, nn.Parameter]) -> dict[str, Tensor]:
    """Each parameter once, and the buffers that belong into a file."""
    tensors: dict[str, Tensor] = {
        name: instead.get(id(parameter), parameter).detach() for name, parameter in model.named_parameters()
    }
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{path}.{name}" if path else name] = buffer
    return tensors


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors.items():
        if shard and filled + tensor.nbytes > shard_bytes:
            yield shard
            shard, filled = {}, 0
        shard[name] = tensor
        filled += tensor.nbytes
    yield shard


def _name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_index(folder: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> Path:
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards.values() for tensor in shard.values())},
        "weight_map": {name: file for file, shard in shards.items() for name in shard},
    }
    draft = folder / f".{INDEX}.draft"
    draft.unlink(missing_ok=True)
    disk.write_durably(draft, [json.dumps(index, indent=2).encode()])
    disk.rename_durably(draft, folder / INDEX)
    return folder / INDEX


def _remove_others(folder: Path, names: set[str]) -> None:
    """Files of an earlier save in other shards, which a reader would take for weights of this one."""
    for path in [*folder.glob("model*.safetensors"), folder / INDEX]:
        if path.name not in names:
            path.unlink(missing_ok=True)
