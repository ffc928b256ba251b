"""Frozen linear layers of a model kept in 8 or 4 bits, for adapters to be trained around them."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from torch import nn

from hybridtrainer.errors import ModelError
from hybridtrainer.memory import nf4
from hybridtrainer.memory.coded_linear import CodedLinear
from hybridtrainer.memory.int8 import Int8Linear
from hybridtrainer.memory.nf4 import Nf4Linear


def quantize_frozen(model: nn.Module, bits: Literal[8, 4] = 8) -> int:
    """Keeps the frozen weights of linear layers in few bits from now on: of a bf16 weight a half, or less than a third.

    The layers still pass gradients on, so that adapters around and before them are trained. A weight that is tied to
    another module stays as it is. With 4 bits a layer whose rows are no whole number of blocks of 64 takes 8. Call it
    after adapters are in place, and before the optimizer is made.

    Args:
        model: Freeze what shall be quantized first, with `requires_grad_(False)`. The transposed layers of Hugging
            Face's GPT-2 are taken too.
        bits: Of a weight.

    Returns:
        Bytes saved.

    Raises:
        ModelError: for another number of bits.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 2))
    >>> quantize_frozen(net)
    12032
    >>> net(torch.ones(1, 64)).sum().backward()
    """
    if bits not in (8, 4):
        raise ModelError(f"Frozen weights cannot be kept in {bits} bits.", "Use 8 or 4.")
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    replaced: dict[nn.Module, CodedLinear] = {}
    saved = 0
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            linear = None if child is None else _as_linear(child)
            if child is None or linear is None or owners[id(child.weight)] > 1:
                continue
            if child not in replaced:
                is_4_bit = bits == 4 and linear.in_features % nf4.BLOCK == 0
                replaced[child] = Nf4Linear(linear) if is_4_bit else Int8Linear(linear)
                saved += linear.weight.nbytes - replaced[child].matrix.nbytes
            parent._modules[name] = replaced[child]
    return saved


def _as_linear(layer: nn.Module) -> nn.Linear | None:
    """A frozen linear layer; None for anything else."""
    if type(layer) is nn.Linear:
        return None if layer.weight.requires_grad else layer
    if type(layer).__name__ != "Conv1D" or not type(layer).__module__.startswith("transformers."):
        return None
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    if weight.requires_grad:
        return None
    inputs, outputs = weight.shape
    linear = nn.Linear(inputs, outputs, device="meta").train(layer.training)
    linear.weight, linear.bias = nn.Parameter(weight.detach().t().contiguous(), requires_grad=False), bias
    return linear
