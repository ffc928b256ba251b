"""A block whose `forward` runs in the engine: a function for autograd, and the change to the module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.memory.calls import Call, Result
from hybridtrainer.memory.engine import Engine
from hybridtrainer.memory.side_ways import contents, require_arguments, require_result, require_untouched


def attach(block: nn.Module, engine: Engine, index: int) -> None:
    """Replaces the block's `forward` on this one module; its class, names and hooks stay."""
    is_known = False  # whether a first run with gradients was looked at

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_known
        call, tensors = Call.of(args, kwargs)
        if not torch.is_grad_enabled():
            result, outputs, _ = engine.forward(index, call, tensors, graph=False)
            return result.value(outputs)
        if not is_known:
            require_arguments(call)
            before = contents(call, tensors)
        holder: list[Result] = []
        outputs = _StreamedCall.apply(engine, index, call, holder, engine.anchor, *tensors)  # type: ignore[no-untyped-call]
        require_result(holder[0], call)
        if not is_known:
            require_untouched(call, tensors, before)
            is_known = True
        return holder[0].value(list(outputs))

    block.forward = forward


class _StreamedCall(torch.autograd.Function):
    """One pass of a block. `anchor` needs a gradient, so that there is a backward pass even if no input does."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        index: int,
        call: Call,
        holder: list[Result],
        anchor: Tensor,  # noqa: ARG004
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        result, outputs, surroundings = engine.forward(index, call, tensors, graph=True)
        holder.append(result)
        ctx.engine, ctx.index, ctx.call, ctx.surroundings = engine, index, call, surroundings
        ctx.kept = engine.keep(tensors)
        ctx.needs_grad = [tensor.requires_grad and tensor.is_floating_point() for tensor in tensors]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        engine, again = ctx.engine, ctx.index in ctx.engine.touched
        try:
            found = engine.backward(ctx.index, ctx.call, ctx.kept.get(), ctx.needs_grad, ctx.surroundings, output_grads)
        except BaseException:  # what was updated before is a step ahead, but for a block that is used twice
            engine.torn = engine.torn or (bool(engine.touched) and not again)
            raise
        ctx.kept.release()
        return (None, None, None, None, None, *found)
