"""A tree of state as two files: safetensors for the tensors, JSON for the rest. No pickle; nothing is read here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridtrainer import disk
from hybridtrainer.errors import ModelError
from hybridtrainer.tree import Json, Tree, pack, tensor_bytes

TENSORS_ENDING, DOCUMENT_ENDING = ".safetensors", ".json"

Written = dict[str, list[int | str]]
"""For each file that was written its size in bytes and its SHA-256."""

_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
}  # fmt: skip


def write_tree(folder: Path, name: str, tree: Tree, first_rows: Mapping[int, int] | None = None) -> Written:
    """Writes a tree durably as the two files `name` of a folder; only one tensor at a time is copied.

    Args:
        folder: Where to.
        name: Of both files.
        tree: What to write.
        first_rows: Where shards begin in the whole tensors, by the `id` of each; 0 for those that are not in it. Then
            the header says so of all tensors.

    Raises:
        OSError: if the disk is full or failing.
        ModelError: if there is something in the tree that these files cannot hold.
    """
    tensors, document = pack(tree)
    files = {
        f"{name}{TENSORS_ENDING}": safetensors_bytes(tensors, _places(tensors, first_rows) if first_rows else None),
        f"{name}{DOCUMENT_ENDING}": iter([json.dumps(document).encode()]),
    }
    return {file: list(disk.write_durably(folder / file, content)) for file, content in files.items()}


def _places(tensors: Mapping[str, Tensor], first_rows: Mapping[int, int]) -> dict[str, str]:
    """Where each tensor begins in the whole one, as torch's distributed checkpoint asks for it."""
    rows = {name: first_rows.get(id(each), 0) for name, each in tensors.items()}
    offsets = {name: {"saved_offsets": [rows[name], *[0] * each.dim()][: each.dim()]} for name, each in tensors.items()}
    return {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}


def safetensors_bytes(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The safetensors format, tensor by tensor: only one of them is ever copied to host memory."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Json] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
            raise ModelError(
                f"The tensor `{name}` is {tensor.dtype}, {tensor.layout}, which a checkpoint cannot hold.",
                "Keep such values as dense tensors of an ordinary type.",
            )
        end = offset + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield from tensor_bytes(tensors[name])
