"""What torch's autocast does on a GPU, for tensors without memory, which it does not know."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrainer.kernels import cross_entropy

# Written by hand in models of one's own, as functions and as methods.
PRODUCTS = {torch: ("matmul", "mm", "bmm", "einsum"), Tensor: ("__matmul__", "matmul", "mm", "bmm")}
SOFTMAXES = {torch: ("softmax", "log_softmax"), Tensor: ("softmax", "log_softmax"), F: ("softmax", "log_softmax")}


def arithmetic(precision: str) -> AbstractContextManager[Any]:
    """What a run with this `memory.precision` computes in."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return nullcontext() if dtype is None else sixteen_bit(dtype)


@contextmanager
def sixteen_bit(dtype: torch.dtype) -> Iterator[None]:
    """Computes as autocast would.

    Products are computed in 16 bits, with a copy of each weight that lasts as long as the backward pass needs it; norms
    and softmax in 32, with copies of what has 16 bits, as in a streamed model. Products that are not those of layers
    are narrowed where 16 and 32 bits meet. Open it around both passes: what is computed again in the backward pass must
    find it.
    """
    copies: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def narrow(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.dtype != torch.float32:
            return tensor
        if not tensor.is_leaf or not tensor.requires_grad:
            return tensor.to(dtype)
        copy = copies.get(id(tensor))
        if copy is None:
            copy = copies[id(tensor)] = tensor.to(dtype)
        return copy

    linear, attention, product_dtype = F.linear, F.scaled_dot_product_attention, cross_entropy.product_dtype

    def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(narrow(x), narrow(weight), narrow(bias))  # type: ignore[arg-type]

    def narrow_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        return attention(narrow(q), narrow(k), narrow(v), *args, **options)  # type: ignore[arg-type]

    def narrow_where_mixed(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def narrowed(*args: Any, **options: Any) -> Tensor:
            kinds = {each.dtype for each in args if isinstance(each, Tensor)}
            if kinds == {dtype, torch.float32}:
                args = tuple(narrow(each) if isinstance(each, Tensor) else each for each in args)
            return product(*args, **options)

        return narrowed

    def narrow_head(*tensors: Tensor | None) -> torch.dtype:
        kinds = {tensor.dtype for tensor in tensors if tensor is not None}
        return dtype if kinds == {dtype, torch.float32} else product_dtype(*tensors)  # type: ignore[arg-type]

    stand_ins: dict[str, Any] = {
        "linear": narrow_linear,
        "layer_norm": _wide_inputs(F.layer_norm),
        "rms_norm": _wide_inputs(F.rms_norm),
        "scaled_dot_product_attention": narrow_attention,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(F, **stand_ins))
        stack.enter_context(patch.object(cross_entropy, "product_dtype", narrow_head))
        for names, around in ((PRODUCTS, narrow_where_mixed), (SOFTMAXES, _wide_inputs)):
            for place, functions in names.items():
                for name in functions:
                    stack.enter_context(patch.object(place, name, around(getattr(place, name))))
        yield


def _wide_inputs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **options: function(*map(_wide, args), **{key: _wide(each) for key, each in options.items()})


def _wide(argument: Any) -> Any:
    return argument.float() if isinstance(argument, Tensor) else argument
