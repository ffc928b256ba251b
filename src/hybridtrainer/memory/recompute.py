"""Activation checkpointing: of a model's blocks only every Nth input is kept; what is between is computed again.

The first block of a segment runs all of it inside torch's `checkpoint`, and the others let their input pass. Without
gradients every block runs as it is: nothing would be kept anyway. Random numbers are drawn as they were, so results
are the same bits. What is kept besides the inputs may change from one pass to the next.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from hybridtrainer.blocks import Around, find_blocks
from hybridtrainer.errors import ModelError
from hybridtrainer.memory.products import with_products_kept

Forward = Callable[..., Any]
Keep = Literal["inputs", "products"]
_OWN = "_forward_without_recompute"


@dataclass
class Segments:
    """What all segments of a model have in common.

    Attributes:
        keep: "inputs" alone, or results of "products" inside the segments too; read when a segment begins.
    """

    keep: Keep = "inputs"


def recompute_blocks(model: nn.Module, every: int, keep: Keep = "inputs") -> Segments:
    """Keeps the input of every Nth block only; 0 keeps all activations, as a model does by itself.

    Args:
        model: A model of repeated blocks, each of which takes a hidden state first and returns it, alone or first.
        every: Blocks in a segment. More of them keep fewer inputs, and more of what is inside while one is computed
            again.
        keep: Whether results of matrix products and of fused attention are kept too. Then only what is cheap is
            computed again.

    Returns:
        What says so from now on.

    Raises:
        ModelError: if the model has no repeated blocks.

    >>> from hybridtrainer.models.gpt import build_gpt
    >>> model = build_gpt("nano")
    >>> segments = recompute_blocks(model, every=2)
    >>> model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    """
    for module in model.modules():
        if _OWN in module.__dict__:
            module.forward = module.__dict__.pop(_OWN)
    segments = Segments(keep)
    modules = find_blocks(model).modules if every else ()
    for start in range(0, len(modules), every or 1):
        _join(modules[start : start + every], segments)
    return segments


def checkpointed(segment: Forward, *args: Any, **kwargs: Any) -> Any:
    """The result of a segment that is computed again in the backward pass; an error in it leaves nothing behind.

    Before torch 2.13, what its `checkpoint` has begun would go on for as long as the traceback of the error lives, and
    whatever is computed meanwhile, such as the same step in smaller parts, would be taken for a part of the segment.
    """
    try:
        return torch_checkpoint.checkpoint(segment, *args, use_reentrant=False, **kwargs)
    except BaseException as error:
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            begun = frame.f_locals.get("gen") if frame.f_code.co_filename == torch_checkpoint.__file__ else None
            if isinstance(begun, GeneratorType):
                begun.close()
        raise


def _join(blocks: Sequence[nn.Module], segments: Segments) -> None:
    """Makes one segment of consecutive blocks."""
    own = [block.forward for block in blocks]
    returned: list[Any] = []  # what the segment has returned beside the hidden state

    def segment(*args: Any, **kwargs: Any) -> Any:
        result = own[0](*args, **kwargs)
        for forward in own[1:]:
            positional, named = _with_hidden(args, kwargs, _hidden(result))
            result = forward(*positional, **named)
        return result

    def first(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own[0](*args, **kwargs)
        run = with_products_kept(segment) if segments.keep == "products" else segment
        result = checkpointed(run, *args, **kwargs)
        # autocast would hold the 16-bit copies of this segment's weights, which nothing else does, to the end.
        torch.clear_autocast_cache()
        if len(own) > 1 and not isinstance(result, Tensor):
            returned[:] = [result]
        return result

    for block, forward in zip(blocks, own, strict=True):
        later = _passing(forward, returned, is_last=block is blocks[-1])
        around = Around(block, first if block is blocks[0] else later)
        block.__dict__[_OWN], block.forward = forward, around


def _passing(forward: Forward, returned: list[Any], is_last: bool) -> Forward:
    """A later block of a segment: its work was done by the first."""

    def passing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        hidden = _given_hidden(args, kwargs)
        result = (hidden, *returned[0][1:]) if returned else hidden
        if is_last:
            returned.clear()  # or the graph would live until the next step
        return result

    return passing


def _hidden(result: Any) -> Tensor:
    hidden = result[0] if isinstance(result, tuple) else result
    if not isinstance(hidden, Tensor):
        raise ModelError(
            f"A block returns a {type(result).__name__}, not a hidden state.", "Use `memory.checkpoint_every = 1` or 0."
        )
    return hidden


def _given_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another hidden state, which comes first."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, kwargs | {next(iter(kwargs)): hidden}
