"""What a piece of training allocates and computes, found by running it with tensors that have no memory.

The code that will run is run, on torch's meta device: every result is entered in a ledger when it is made and struck
out when nothing refers to it any more. The peak of the ledger is what a GPU's allocator will be asked for. Operations
that a GPU has in one kernel and torch writes out on the meta device have stand-ins here.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hybridtrainer.planning.scratch import reduction_bytes

ROUNDING_BYTES = 512  # the allocator's unit
REDUCTIONS = (torch.ops.aten.sum, torch.ops.aten.mean)

# An operation of its own, so that what keeps results of attention in a segment sees it as it sees torch's.
_OPERATIONS = library.Library("hybridtrainer", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATIONS.define(  # type: ignore[no-untyped-call]
    "_scaled_dot_product_rehearsed(Tensor q, Tensor k, Tensor v, float dropout_p, bool is_causal) -> (Tensor, Tensor)"
)


def _attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """The result, and a number for each row of the scores.

    A GPU's kernels work on tokens by heads and lay the result out as the queries are: if those are dense with heads
    first it is too, and a copy follows where heads are joined; if they are a part of one product it is not.
    """
    sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if q.dim() < 3 or v.shape[-1] != q.shape[-1]:
        return q.new_empty((*q.shape[:-1], v.shape[-1])), sums
    return torch.empty_like(q.transpose(-3, -2)).transpose(-3, -2), sums


_OPERATIONS.impl("_scaled_dot_product_rehearsed", _attention, "Meta")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Spent:
    """What a rehearsal has taken.

    Attributes:
        peak_bytes: The most that was allocated at a time, beyond what was there before.
        left_bytes: What is still allocated at the end.
        flops: Floating-point operations of matrix products.
        product_bytes: What these products read and write.
        other_bytes: What all other kernels read and write.
        kernels: How many kernels are launched.
        kept_bytes: What the work keeps for what comes `then`.
    """

    peak_bytes: int = 0
    left_bytes: int = 0
    flops: float = 0.0
    product_bytes: int = 0
    other_bytes: int = 0
    kernels: int = 0
    kept_bytes: int = 0


def rehearse(
    work: Callable[[], Any], present: Iterable[Tensor] = (), then: Callable[[Any], Any] | None = None
) -> Spent:
    """Runs `work` on meta tensors and returns what it took.

    Args:
        work: Must use tensors on the meta device only.
        present: Tensors that are there before; they are not counted.
        then: What is done with the result, such as its backward pass; counted too.

    >>> weight = torch.empty(1024, 1024, device="meta")
    >>> rehearse(lambda: (weight @ weight).relu(), [weight]).peak_bytes // 2**20
    8
    """
    ledger = Ledger(present)
    with _fused(ledger), NothingUnusual(), ledger:
        kept = work()
        kept_bytes = ledger.spent().left_bytes
        if then is not None:
            then(kept)
    spent = replace(ledger.spent(), kept_bytes=kept_bytes)
    del kept
    return spent


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what every operation allocates, reads and writes."""

    def __init__(self, present: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in present}
        self._now = self._peak = 0
        self._flops, self._product_bytes, self._other_bytes, self._kernels = 0.0, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and enters what it made."""
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.enter(made)
        if func._overloadpacket in REDUCTIONS:
            self._peak = max(self._peak, self._now + reduction_bytes(args[0], args[1] if len(args) > 1 else None))
        if not _is_view(func, made, read):
            self.charge(_flops(func, args, kwargs or {}, result), _nbytes(*made, *read))
        return result

    def enter(self, made: Iterable[Tensor]) -> None:
        """Enters tensors that exist now."""
        for tensor in made:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._sizes:
                continue
            self._sizes[key] = math.ceil(storage.nbytes() / ROUNDING_BYTES) * ROUNDING_BYTES
            self._now += self._sizes[key]
            self._peak = max(self._peak, self._now)
            weakref.finalize(storage, self._strike_out, key)

    def charge(self, flops: float, nbytes: int) -> None:
        """Counts one kernel."""
        self._kernels += 1
        self._flops += flops
        if flops:
            self._product_bytes += nbytes
        else:
            self._other_bytes += nbytes

    def spent(self) -> Spent:
        """All that was counted up to here."""
        return Spent(self._peak, self._now, self._flops, self._product_bytes, self._other_bytes, self._kernels)

    def _strike_out(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)


class NothingUnusual(TorchFunctionMode):
    """Answers yes where a model looks into its data: that no token is padding, that sequences are not packed.

    And leaves on the meta device what a loss function sends to another, or makes there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__:
            return True
        if func is Tensor.cuda:
            return args[0].to("meta")
        if func is Tensor.cpu:
            return args[0]
        if func is Tensor.to:
            if len(args) > 1 and isinstance(args[1], Tensor):
                args = (args[0], args[1].device, args[1].dtype, *args[2:])
            args = (args[0], *(_instead(each, args[0].device) if _is_device(each) else each for each in args[1:]))
        if kwargs.get("device") is not None:
            place = args[0].device if func is Tensor.to else torch.device("cpu")
            kwargs = kwargs | {"device": _instead(kwargs["device"], place)}
        return func(*args, **kwargs)


def _is_device(argument: Any) -> bool:
    return isinstance(argument, str | torch.device) or type(argument) is int


def _instead(device: Any, of_cpu: torch.device) -> torch.device:
    """The meta device in place of any GPU, and what is said in place of the CPU."""
    is_cpu = not isinstance(device, int) and torch.device(device).type == "cpu"
    return of_cpu if is_cpu else torch.device("meta")


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    packet = func._overloadpacket
    if packet is torch.ops.hybridtrainer._scaled_dot_product_rehearsed:
        q, k, _, _, is_causal = args
        return _attention_flops(q, k, is_causal)
    return float(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0.0


def _attention_flops(q: Tensor, k: Tensor, is_causal: bool) -> float:
    return 2 * 2 * math.prod(q.shape[:-1]) * k.shape[-2] * q.shape[-1] * (0.5 if is_causal else 1.0)


def _is_view(func: Any, made: list[Tensor], read: list[Tensor]) -> bool:
    """Whether an operation only looks at memory that is there: no kernel runs."""
    if func._schema.is_mutable or not read:
        return False
    known = {tensor.untyped_storage()._cdata for tensor in read}
    return all(tensor.untyped_storage()._cdata in known for tensor in made)


def _fused(ledger: Ledger) -> AbstractContextManager[Any]:
    """Attention, norms and products by expert as a GPU has them, one kernel that keeps little for the backward pass.

    They are put in the place of torch's own functions: a mode of torch would be off where a checkpointed block is
    computed again inside the backward pass.
    """

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,  # noqa: ARG001
        **options: Any,  # noqa: ARG001
    ) -> Tensor:  # fmt: skip
        out: Tensor = _Attention.apply(ledger, dropout_p, is_causal, q, k, v)  # type: ignore[no-untyped-call]
        return out

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:  # noqa: ARG001
        out: Tensor = _RMSNorm.apply(ledger, x, weight)  # type: ignore[no-untyped-call]
        return out

    def grouped_mm(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        # Torch's own is written for one type without memory. Which token goes to which expert changes no size.
        is_by_expert = x.dim() == 2 and weight.dim() == 3
        return x @ weight[0] if is_by_expert else own_grouped_mm(x, weight, **options)

    own_grouped_mm: Any = getattr(F, "grouped_mm", None)
    stand_ins: dict[str, Any] = {"scaled_dot_product_attention": attention, "rms_norm": rms_norm}
    return patch.multiple(F, **stand_ins | ({"grouped_mm": grouped_mm} if own_grouped_mm else {}))


class _Attention(torch.autograd.Function):
    """Keeps its inputs, its result and a number for each row of the scores, which never exist whole."""

    @staticmethod
    def forward(ctx: Any, ledger: Ledger, dropout_p: float, is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor
        out, sums = torch.ops.hybridtrainer._scaled_dot_product_rehearsed(q, k, v, dropout_p, is_causal)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.ledger = ledger
        ctx.flops = _attention_flops(q, k, is_causal)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        torch.empty_like(sums)  # of the products of rows with their gradients
        found = tuple(torch.empty_like(each) for each in (q, k, v))
        ctx.ledger.charge(2.5 * ctx.flops, _nbytes(q, k, v, out, grad, *found))
        return (None, None, None, *found)


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and a number for each row."""

    @staticmethod
    def forward(ctx: Any, ledger: Ledger, x: Tensor, weight: Tensor | None) -> Tensor:
        out = torch.empty_like(x)
        sums = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, sums, *(() if weight is None else (weight,)))
        ctx.ledger = ledger
        ledger.charge(0, _nbytes(x, out))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, _, *weight = ctx.saved_tensors
        found = torch.empty_like(x)
        ctx.ledger.charge(0, 2 * _nbytes(x, grad) + _nbytes(found))
        return None, found, torch.empty_like(weight[0]) if weight else None


def _nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
