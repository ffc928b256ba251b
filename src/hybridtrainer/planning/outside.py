"""What a model does outside its blocks with a loss of its own: how it calls the first, and what comes behind the last.

Nothing is known here of heads: the loss function is run as it is, with stand-ins for the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.blocks import Blocks
from hybridtrainer.errors import HybridTrainerError, ModelError
from hybridtrainer.losses import LossFunction
from hybridtrainer.memory.calls import Call, Result
from hybridtrainer.planning.rehearsal import NothingUnusual, Spent, rehearse


@dataclass(frozen=True)
class Behind:
    """What comes behind the last block.

    Attributes:
        spent: Forward and backward, down to the gradient of what the last block returned.
        tied_bytes: Gradients that wait for the backward pass to end, because what is before the blocks shares their
            weights.
    """

    spent: Spent
    tied_bytes: int


class _Reached(Exception):  # noqa: N818
    """The first block was called."""


def first_call(model: nn.Module, block: nn.Module, run: Callable[[], Any]) -> tuple[Call, list[Tensor]]:
    """With what the model calls its first block when it is run, its tensors with their graph.

    Raises:
        ModelError: if it fails before, or never calls it.
    """
    seen: list[tuple[Call, list[Tensor]]] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Call.of(args, kwargs))
        raise _Reached

    handle = block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with NothingUnusual():
            run()
    except _Reached:
        pass
    except HybridTrainerError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be run without values: {error}",
            "Give a model that takes tokens alone, or the loss that it is trained with (`loss=`).",
        ) from error
    finally:
        handle.remove()
    if not seen:
        raise ModelError(f"{type(model).__name__} did not call its first block.", "Give a decoder of repeated blocks.")
    return seen[0]


def rehearse_behind(
    model: nn.Module,
    found: Blocks,
    loss: LossFunction,
    tokens: Tensor,
    before: Sequence[Tensor],
    returned: tuple[Result, list[Tensor]],
) -> Behind:
    """Rehearses the loss with blocks that compute nothing. The blocks are of no use afterwards.

    Args:
        model: Without memory.
        found: Its blocks.
        loss: What the model is trained with.
        tokens: A batch of it.
        before: With what the first block is called, with the graph of how that came about.
        returned: What each block returns.

    Raises:
        ModelError: if the loss cannot be computed without values.
    """
    result, outputs = returned
    leaves = [torch.empty_like(output, requires_grad=output.is_floating_point()) for output in outputs]
    for block in found.modules[:-1]:
        block.forward = lambda *_, **__: result.value(outputs)
    found.modules[-1].forward = lambda *_, **__: result.value(leaves)
    rest = [model.get_parameter(name) for name in found.rest]
    trained = [parameter for parameter in rest if parameter.requires_grad]
    shared = [False] * len(trained)

    def work() -> Any:
        sources = [leaf for leaf in leaves if leaf.requires_grad]
        grads = torch.autograd.grad(loss(model, tokens).mean(), [*sources, *trained], allow_unused=True)
        shared[:] = [grad is not None for grad in grads[len(sources) :]]
        return grads

    try:
        spent = rehearse(work, [*rest, *model.buffers(), tokens, *outputs, *leaves])
        used = _used(before, trained)
    except HybridTrainerError:
        raise
    except Exception as error:
        raise ModelError(
            f"What {type(model).__name__} does behind its blocks in a streamed step, where weights have "
            f"{outputs[0].dtype}, cannot be rehearsed: {error}.",
            "Look whether `stream` and a step of it work on a CPU with the same loss.",
        ) from error
    both = (each.nbytes for each, here, there in zip(trained, shared, used, strict=True) if here and there)
    return Behind(spent, sum(both))


def _used(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[bool]:
    """Which parameters these tensors were computed from."""
    sources = [tensor.sum() for tensor in tensors if tensor.requires_grad]
    if not sources or not parameters:
        return [False] * len(parameters)
    return [grad is not None for grad in torch.autograd.grad(sources, parameters, allow_unused=True)]
