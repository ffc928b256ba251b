"""Finds the repeated blocks of a decoder, which alone need be where the computation is, one after the other.

It goes by structure: no class of a model is known here by name, nothing is run, and weights may be on the meta
device. What would give wrong results when blocks come and go is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hybridtrainer.errors import ModelError


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model.

    Attributes:
        path: Of the list that holds them, such as "model.layers"; "" where that is the model itself.
        modules: The blocks in their order; parameters have the same names, shapes and types in each.
        rest: Names of the parameters outside, such as embedding and head; a shared one is named once.
    """

    path: str
    modules: tuple[nn.Module, ...]
    rest: tuple[str, ...]


class Around:
    """Stands for the `forward` of a block for as long as somebody arranges how it is computed.

    A copy of the model, or a pickled one, is without it: what is called knows the blocks of this model alone.

    Args:
        block: Whose `forward` it becomes.
        call: What is called instead.
    """

    def __init__(self, block: nn.Module, call: Callable[..., Any]) -> None:
        self._block, self._call = block, call
        self._own = block.__dict__.get("forward")  # what others have put there; None for that of its class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What is called instead."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_around, (self._block, self._own)


def _without_around(block: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    return MethodType(type(block).forward, block) if own is None else own


def find_blocks(model: nn.Module) -> Blocks:
    """The stack of blocks that holds most of the model: an `nn.ModuleList` or `nn.Sequential` of one kind of module.

    Raises:
        ModelError: if there is none, if its blocks differ, if they share parameters with each other or with the rest
            of the model, or if they keep running statistics.

    >>> find_blocks(nn.Sequential(nn.Embedding(9, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))).path
    '1'
    """
    path, stack = _largest_stack(model)
    modules = tuple(_items(stack))
    for index, block in enumerate(modules[1:], start=1):
        difference = _difference(modules[0], block, index)
        if difference:
            raise ModelError(
                f"The blocks of {_said(path)} are not alike: {difference}.",
                "Give every block the same class and the same parameters, or keep the whole model on one device.",
            )
    _check_not_shared(path, modules)
    _check_without_statistics(path, modules)
    return Blocks(path, modules, _rest(model, path, stack, modules))


def _largest_stack(model: nn.Module) -> tuple[str, nn.Module]:
    """The list with the most parameters among those that repeat a module; the outermost where there is a tie."""
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if _repeats(module)
    }
    if not sizes:
        raise ModelError(
            f"No repeated blocks were found in {type(model).__name__}.",
            "Put the blocks of the model, at least 2 modules of one class, in an `nn.ModuleList` of their own.",
        )
    path = max(sizes, key=lambda name: sizes[name])
    return path, model.get_submodule(path)


def _repeats(module: nn.Module) -> bool:
    """Whether a module is a list whose largest item has another of its class beside it.

    Lists with some odd items count, so that they are refused rather than passed over for a smaller list inside them.
    """
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    items = _items(module)
    sizes = [sum(parameter.numel() for parameter in item.parameters()) for item in items]
    if not any(sizes):
        return False
    largest = type(items[sizes.index(max(sizes))])
    callable_alone = not issubclass(largest, nn.ModuleList | nn.ModuleDict)
    return callable_alone and sum(type(item) is largest for item in items) > 1


def _items(stack: nn.Module) -> list[nn.Module]:
    # Not `children()`, which leaves out a module that is in the list twice.
    return [item for item in stack._modules.values() if item is not None]


def _difference(first: nn.Module, other: nn.Module, index: int) -> str | None:
    """The first way in which block `index` differs from block 0; None where it does not."""
    if type(first) is not type(other):
        return f"block 0 is a {type(first).__name__} and block {index} a {type(other).__name__}"
    left = {name: (tuple(one.shape), one.dtype) for name, one in first.named_parameters()}
    right = {name: (tuple(one.shape), one.dtype) for name, one in other.named_parameters()}
    for name in [*left, *right]:
        if name not in right:
            return f"{name} is in block 0 and not in block {index}"
        if name not in left:
            return f"{name} is in block {index} and not in block 0"
        if left[name] != right[name]:
            (shape, dtype), (other_shape, other_dtype) = left[name], right[name]
            return f"{name} is {shape} of {dtype} in block 0 and {other_shape} of {other_dtype} in block {index}"
    return None


def _check_not_shared(path: str, modules: Sequence[nn.Module]) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for index, block in enumerate(modules):
        for name, parameter in block.named_parameters():
            owner, known_as = owners.setdefault(id(parameter), (index, name))
            if owner != index:
                raise ModelError(
                    f"Blocks {owner} and {index} of {_said(path)} share a parameter ({known_as}, {name}).",
                    "Give each block parameters of its own, or keep the whole model on one device.",
                )


def _check_without_statistics(path: str, modules: Sequence[nn.Module]) -> None:
    for index, block in enumerate(modules):
        for name, module in block.named_modules():
            if isinstance(module, _NormBase) and module.running_mean is not None:
                raise ModelError(
                    f"Block {index} of {_said(path)} keeps running statistics ({name or 'itself'}, "
                    f"a {type(module).__name__}), which computing a block twice would count twice.",
                    "Use LayerNorm, RMSNorm or GroupNorm in the blocks, or set `track_running_stats=False`.",
                )


def _rest(model: nn.Module, path: str, stack: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    inside = {id(parameter): index for index, block in enumerate(modules) for parameter in block.parameters()}
    names: dict[int, str] = {}
    for name, parameter in _outside(model, stack, "", set()):
        if id(parameter) in inside:
            raise ModelError(
                f"Block {inside[id(parameter)]} of {_said(path)} shares {name} with the rest of the model.",
                "Give the block a parameter of its own, or keep the whole model on one device.",
            )
        names.setdefault(id(parameter), name)
    return tuple(names.values())


def _outside(
    module: nn.Module, stack: nn.Module, prefix: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter that can be reached without going through the stack, which may have a second name."""
    if module in seen:
        return
    seen.add(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, child in module._modules.items():
        if child is not None and module is not stack:
            yield from _outside(child, stack, f"{prefix}{name}.", seen)


def _said(path: str) -> str:
    return path or "the model"
