"""Nested state as named tensors and a JSON document, and back, without pickle.

A tree is what `state_dict()` methods return: dicts, lists, tuples, numbers, strings, None and tensors.
JSON cannot say everything Python can, so what it lacks is written as a dict with one `$` key. This module
knows nothing of files or of what the state means.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from hybridtrainer.errors import ModelError

Tree = Any
"""Nested dicts, lists, tuples, scalars and tensors."""

Json = Any


def pack(tree: Tree) -> tuple[dict[str, Tensor], Json]:
    """Splits a tree into its tensors, named by their path, and a JSON document that refers to them.

    >>> import torch
    >>> tensors, document = pack({"w": torch.zeros(2), "betas": (0.9, 0.95), "best": float("inf")})
    >>> sorted(tensors), document["betas"], document["best"]
    (['w'], {'$tuple': [0.9, 0.95]}, {'$float': 'inf'})

    Raises:
        ModelError: for a value that cannot be stored without running code on load.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(tree, "", tensors)


def unpack(document: Json, tensor: Callable[[str], Tensor]) -> Tree:
    """Builds the tree again; `tensor` is called with the name of each tensor as it is needed."""
    if isinstance(document, list):
        return [unpack(item, tensor) for item in document]
    if not isinstance(document, dict):
        return document
    if len(document) == 1:
        ((tag, value),) = document.items()
        match tag:
            case "$tensor":
                return tensor(value)
            case "$float":
                return float(value)
            case "$tuple":
                return tuple(unpack(item, tensor) for item in value)
            case "$dict":
                return {unpack(key, tensor): unpack(item, tensor) for key, item in value}
            case "$counter":
                return Counter({unpack(key, tensor): count for key, count in value})
    return {key: unpack(item, tensor) for key, item in document.items()}


def fingerprint(tree: Mapping[str, Tree]) -> dict[str, str]:
    """SHA-256 of each part of a state, and of the whole under the key "all"."""
    digests = {name: _digest(part) for name, part in tree.items()}
    lines = [f"{name} {digest}\n" for name, digest in sorted(digests.items())]
    digests["all"] = hashlib.sha256("".join(lines).encode()).hexdigest()
    return digests


def tensor_bytes(tensor: Tensor, chunk_bytes: int = 1 << 24) -> Iterator[memoryview]:
    """The tensor's bytes in C order, piece by piece; at most one copy of this one tensor is made."""
    host = tensor.detach().cpu().contiguous()
    if not host.nbytes:
        return
    raw = (ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())
    raw.owner = host  # type: ignore[attr-defined]  # whoever holds a piece keeps the memory alive
    view = memoryview(raw).cast("B")
    for start in range(0, len(view), chunk_bytes):
        yield view[start : start + chunk_bytes]


def _digest(part: Tree) -> str:
    tensors, document = pack(part)
    digest = hashlib.sha256(json.dumps(_in_order(document), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for piece in tensor_bytes(tensor):
            digest.update(piece)
    return digest.hexdigest()


def _in_order(document: Json) -> Json:
    """The document with the items of tagged dicts sorted: two equal dicts may have been filled in another order."""
    if isinstance(document, list):
        return [_in_order(item) for item in document]
    if not isinstance(document, dict):
        return document
    ordered = {key: _in_order(item) for key, item in document.items()}
    for tag in ordered.keys() & {"$dict", "$counter"}:
        ordered[tag] = sorted(ordered[tag], key=json.dumps)
    return ordered


def _encode(value: Tree, path: str, tensors: dict[str, Tensor]) -> Json:
    if isinstance(value, Tensor):
        while path in tensors:  # keys of different types, or with slashes, may give the same path
            path += "'"
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Counter):
        return {"$counter": [[_encode(key, path, tensors), count] for key, count in value.items()]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encode(item, _join(path, key), tensors) for key, item in value.items()}
        items = [[_encode(key, path, tensors), _encode(item, _join(path, key), tensors)] for key, item in value.items()]
        return {"$dict": items}
    if isinstance(value, list | tuple):
        encoded = [_encode(item, _join(path, index), tensors) for index, item in enumerate(value)]
        return encoded if isinstance(value, list) else {"$tuple": encoded}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # numpy scalars
        return _encode(value.item(), path, tensors)
    raise ModelError(
        f"The run's state holds a {type(value).__name__} at `{path}`, which cannot be stored without pickle.",
        "Give that object a `state_dict` of numbers, strings, lists, dicts and tensors.",
    )


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)
