"""What a checkpointed segment keeps besides its input: results of matrix products and of fused attention.

They cost the most to compute; norms, activations, additions, casts and dropout are computed again around them. So is
attention that draws random numbers, or what is drawn after it would be other numbers, and a result that was changed in
place. Results are the same bits as without, unless a block writes into the `.data` of a product, which nobody can see.
Blocks with operations that are made of others, as `torch.cond` is, are refused by torch.

torch's own selective checkpoint raises where a result was changed in place (an activation with `inplace=True`), and
where autocast casts a weight the second time that it had cast before the segment the first time; it does not look at
what attention draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
MATRIX_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
FUSED_ATTENTION = "_scaled_dot_product"  # how the names of torch's kernels begin, on each device
# Autograd saves nothing for these: what only they read is not asked for when a segment is computed again.
NEED_NOTHING = {_aten.add, _aten.view, _aten._unsafe_view, _aten._to_copy, _aten.detach, _aten.clone}


def with_products_kept(segment: Callable[..., Any]) -> Callable[..., Any]:
    """For one call of torch's `checkpoint`: the first run keeps results of products, later ones have them ready.

    The modes are entered here, not by `checkpoint`: before torch 2.13 its own contexts outlive an error in the segment.

    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.ones(2, 2, requires_grad=True)
    >>> checkpoint(with_products_kept(lambda x: (x @ x).tanh()), x, use_reentrant=False).sum().backward()
    """
    kept: list[_Kept | None] = []
    mode: _Keep | _Recall = _Keep(kept)

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal mode
        with mode:
            result = segment(*args, **kwargs)
        mode = _Recall(kept)
        return result

    return run


@dataclass(frozen=True)
class _Kept:
    """One result, and what its tensors counted of changes in place when it was made."""

    func: Any
    result: Any
    versions: list[int]

    def holds_for(self, func: Any) -> bool:
        return self.func is func and self.versions == _versions(self.result)


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around the forward pass of a segment."""

    supports_higher_order_operators = True

    def __init__(self, kept: list[_Kept | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._is_last_needed = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_product(func, args, kwargs):
            alias = tree_map_only(Tensor, _alias, result)
            self._kept.append(_Kept(func, alias, _versions(alias)))
            self._is_last_needed = False
        elif _packet(func) not in NEED_NOTHING:
            self._is_last_needed = True
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._kept and not self._is_last_needed:
            self._kept[-1] = None


class _Recall(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around the same computed again: each kept result is given out once, so that it is freed as soon as it may be."""

    supports_higher_order_operators = True

    def __init__(self, kept: list[_Kept | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._next = 0

    def __enter__(self) -> _Recall:
        self._next = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_product(func, args, kwargs) and self._next < len(self._kept):
            found, self._kept[self._next] = self._kept[self._next], None
            self._next += 1
            if found is not None and found.holds_for(func):
                return found.result
        return func(*args, **(kwargs or {}))


def _is_product(func: Any, args: Any, kwargs: Any) -> bool:
    packet = _packet(func)
    if packet is None or packet in MATRIX_PRODUCTS:
        return packet is not None
    return packet.__name__.startswith(FUSED_ATTENTION) and not _dropout(func, args, kwargs or {})


def _packet(func: Any) -> Any:
    """The operation without its kinds of arguments; None for one that is made of others, such as `torch.cond`."""
    return getattr(func, "overloadpacket", None)


def _dropout(func: Any, args: Any, kwargs: Any) -> float:
    """The share that an attention kernel drops."""
    names = [argument.name for argument in func._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    return float(named.get("dropout_p", 0.0))


def _alias(tensor: Tensor) -> Tensor:
    """The same memory and count of changes, without the graph that the tensor is about to belong to."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(result: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
