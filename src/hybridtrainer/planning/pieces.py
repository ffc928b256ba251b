"""The pieces of a decoder's training step, each rehearsed: a block forward and backward, and what comes behind them.

Blocks are alike, so one stands for all. The model itself is not touched and nothing of its size is allocated.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.blocks import Blocks, find_blocks
from hybridtrainer.kernels.cross_entropy import head_loss
from hybridtrainer.kernels.formats import Mode, weight_dtype
from hybridtrainer.losses import LossFunction
from hybridtrainer.memory.body import Body
from hybridtrainer.memory.layout import Layout
from hybridtrainer.memory.placement import block_layouts, lone_layouts
from hybridtrainer.models.language import head_of, language_loss
from hybridtrainer.planning.arithmetic import arithmetic
from hybridtrainer.planning.outside import Behind, first_call, rehearse_behind
from hybridtrainer.planning.rehearsal import Spent, rehearse

TILE_TOKENS = 1024  # as `language_loss` has it


@dataclass(frozen=True)
class Pieces:
    """What the pieces of one step take.

    Attributes:
        layouts: Of each block, in order.
        lone: Of each trained parameter outside the blocks.
        rest_bytes: All parameters and buffers outside the blocks, on the device.
        tied_bytes: Gradients of the head that wait for the backward pass to end, because the embedding shares it.
        hidden_bytes: What passes from block to block.
        forward: One block, all samples.
        backward: One block's gradients, recomputed.
        head: Head and loss, forward and backward.
        widened_bytes: Of hidden states before and behind the last norm while the head is computed, where autocast lets
            it work in 32 bits: more than they take without.
    """

    layouts: Sequence[Layout]
    lone: Sequence[Layout]
    rest_bytes: int
    tied_bytes: int
    hidden_bytes: int
    parameters: int
    forward: Spent
    backward: Spent
    head: Spent
    widened_bytes: int = 0


def with_mode(pieces: Pieces, model: nn.Module, mode: Mode) -> Pieces:
    """The same pieces in another mode that computes in the same type: only what is kept differs."""
    found = find_blocks(model)
    lone = lone_layouts(model, found, mode)
    return replace(pieces, layouts=block_layouts(found, mode, {}), lone=list(lone.values()))


def rehearse_pieces(
    model: nn.Module,
    mode: Mode,
    samples: int,
    context: int,
    split: int,
    known: Pieces | None = None,
    precision: str = "fp32",
    loss: LossFunction = language_loss,
) -> Pieces:
    """Rehearses one streamed step of a decoder in a mode.

    Args:
        model: A decoder whose forward takes tokens, on any device.
        samples: Sequences in a step.
        context: Tokens in a sequence.
        split: Parts into which the samples are divided inside a block.
        known: A rehearsal with another split, on which what comes behind the blocks does not depend.
        precision: As `memory.precision`: "bf16" and "fp16" compute under autocast, whatever type the weights have.
        loss: What is trained with. With `language_loss` the head alone is rehearsed; with another, all that it does.

    Raises:
        ModelError: if the model has no repeated blocks, or cannot be run without values.
    """
    model = without_cache(without_memory(model, weight_dtype(mode)))
    found = find_blocks(model)
    layouts, lone = block_layouts(found, mode, {}), lone_layouts(model, found, mode)
    tokens = torch.empty(samples, context + 1, dtype=torch.long, device="meta")
    is_own = loss is not language_loss
    run_model = (lambda: loss(model, tokens)) if is_own else (lambda: model(torch.empty_like(tokens[:, 1:])))
    call, before = first_call(model, found.modules[0], run_model)
    tensors = [tensor.detach() for tensor in before]
    entries = layouts[0].entries
    weights = [torch.empty(entry.shape, dtype=entry.weight.dtype, device="meta") for entry in entries]
    trainable = [entry.trainable for entry in entries]
    body = Body(found.modules[0], [entry.name for entry in entries])
    chunk = -(-samples // split)
    floating = [tensor.is_floating_point() for tensor in tensors]
    needs_grad = [index == 0 and floating[0] for index in range(len(tensors))]
    result, outputs = body.forward(weights, call, tensors, samples)
    grads = [torch.empty_like(output) for output in outputs]
    present = [*weights, *tensors, *grads]

    def run() -> Any:
        with arithmetic(precision):
            return body.forward(weights, call, tensors, chunk)

    def run_again() -> Any:
        with arithmetic(precision):
            return body.gradients(weights, trainable, call, tensors, needs_grad, grads, chunk)

    forward, backward = rehearse(run, present), rehearse(run_again, present)
    if known is not None:
        behind = Behind(known.head, known.tied_bytes)
    elif is_own:
        behind = rehearse_behind(model, found, loss, tokens, before, (result, outputs))
    else:
        behind = _rehearse_head(model, samples * context)
    rest = [model.get_parameter(name) for name in found.rest] + list(model.buffers())
    return Pieces(
        layouts,
        list(lone.values()),
        sum(tensor.numel() * tensor.element_size() for tensor in rest),
        behind.tied_bytes,
        tensors[0].numel() * tensors[0].element_size(),
        sum(parameter.numel() for parameter in model.parameters()),
        forward,
        backward,
        behind.spent,
        _widened_bytes(model, found, tensors[0], precision),
    )


def _widened_bytes(model: nn.Module, found: Blocks, hidden: Tensor, precision: str) -> int:
    """The last norm makes a copy of its input in 32 bits; its result and the gradient of that have 32 bits as well."""
    inside = {id(module) for block in found.modules for module in block.modules()}
    norms = [each for each in model.modules() if isinstance(each, nn.LayerNorm | nn.RMSNorm) and id(each) not in inside]
    if precision not in ("bf16", "fp16") or hidden.element_size() != 2 or not norms:
        return 0
    return 4 * hidden.nbytes


def without_memory(model: nn.Module, dtype: torch.dtype | None = None, left_out: object = None) -> nn.Module:
    """A copy of a model on the meta device, floating-point parameters in `dtype`; `left_out` is not copied with it."""
    memo: dict[int, Any] = {id(left_out): "left out"} if left_out is not None else {}
    for parameter in model.parameters():
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        empty = torch.empty(parameter.shape, dtype=kind, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def without_cache(model: nn.Module) -> nn.Module:
    """The same model, told not to keep keys and values, as `stream` tells it."""
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # type: ignore[union-attr]
    return model


def _rehearse_head(model: nn.Module, tokens: int) -> Behind:
    """The head and `language_loss`, whose hidden states are there."""
    head = head_of(model)
    hidden = torch.empty(tokens, head.in_features, dtype=head.weight.dtype, device="meta", requires_grad=True)
    weight = head.weight.detach().requires_grad_()
    targets = torch.empty(tokens, dtype=torch.long, device="meta")

    def loss() -> tuple[Tensor, ...]:
        mean = head_loss(hidden, weight, targets, tile_tokens=TILE_TOKENS).mean()
        return torch.autograd.grad(mean, [hidden, weight])

    places = [each for module in model.modules() for each in module._parameters.values() if each is head.weight]
    return Behind(rehearse(loss, [hidden, weight, targets]), head.weight.nbytes if len(places) > 1 else 0)
