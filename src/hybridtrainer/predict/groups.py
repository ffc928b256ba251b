"""Which parameters are forecast together: by role in the model, and by learning rate."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from hybridtrainer.weights import WeightGroup

ROLES = ("embedding", "attention", "mlp", "norms and biases", "head", "other")

_ATTENTION_WORDS = ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj", "qkv")
_MLP_WORDS = ("mlp", "ffn", "feed_forward", "feedforward", "c_fc", "gate_proj", "up_proj", "down_proj")
_HEAD_WORDS = ("head", "classifier", "fc_out", "logits")


def group_parameters(model: nn.Module, optimizer: Optimizer) -> list[WeightGroup]:
    """Groups of trainable parameters that the optimizer owns, in a fixed order.

    Tied weights appear once, frozen ones not at all.

    >>> import torch
    >>> net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    >>> [group.name for group in group_parameters(net, torch.optim.SGD(net.parameters(), lr=0.1))]
    ['embedding', 'norms and biases', 'other']
    """
    lr_groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    members: dict[tuple[str, int], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or id(parameter) not in lr_groups:
            continue
        role = "embedding" if id(parameter) in embeddings else _role(name, parameter)
        members.setdefault((role, lr_groups[id(parameter)]), []).append(parameter)
    ordered = sorted(members, key=lambda key: (ROLES.index(key[0]), key[1]))
    return [WeightGroup(role, lr_group, tuple(members[role, lr_group])) for role, lr_group in ordered]


def _role(name: str, parameter: nn.Parameter) -> str:
    lowered = name.lower()
    if parameter.dim() < 2:
        return "norms and biases"
    if any(word in lowered for word in _ATTENTION_WORDS):
        return "attention"
    if any(word in lowered for word in _MLP_WORDS):
        return "mlp"
    if any(word in lowered for word in _HEAD_WORDS):
        return "head"
    return "other"
