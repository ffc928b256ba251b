"""What goes in or out of a block by another way than arguments and results, and what a block changes on its way.

A block is computed once without a graph and once more with one, cut off from the rest. A gradient goes through its
arguments and results alone, and a change happens twice. What can be seen of it is seen at the first visits, and
refused; afterwards nothing is looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.calls import Call, Result

PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.layout, torch.Size)
DEEPEST = 5
CAPTURED = {
    "output_router_logits": "a loss on the routers needs a model that stays on one device",
    "output_attentions": "compute them under `torch.no_grad()`, if you only want to look at them",
}
Buffers = list[tuple[str, Tensor, int]]
Versions = tuple[list[tuple[int, int]], list[tuple[int, int]]]


def require_result(result: Result, call: Call) -> None:
    """Refuses objects whose tensors would be passed on without their gradients."""
    for leaf in result.leaves:
        if not isinstance(leaf, PLAIN) and not any(leaf is each for each in call.leaves):
            raise ModelError(
                f"A streamed block returns a {type(leaf).__name__}, and tensors in it would have no gradient.",
                "Return a tensor, or tensors in a tuple, a list or a dictionary.",
            )


def require_arguments(call: Call) -> None:
    """Refuses objects with tensors that need a gradient; other objects count as constants."""
    for leaf in call.leaves:
        if not isinstance(leaf, PLAIN) and any(each.requires_grad for each in tensors_in(leaf)):
            raise ModelError(
                f"A streamed block gets a {type(leaf).__name__} with a tensor that needs a gradient, and would not "
                "give it one.",
                "Pass the tensor itself, alone or in a tuple, a list or a dictionary.",
            )


def contents(call: Call, tensors: Sequence[Tensor]) -> Versions:
    """The tensors that a block gets, and those in objects that it gets, to be compared after it has run."""
    objects = [leaf for leaf in call.leaves if not isinstance(leaf, PLAIN)]
    return [_version(each) for each in tensors], [_version(each) for leaf in objects for each in tensors_in(leaf)]


def require_untouched(call: Call, tensors: Sequence[Tensor], before: Versions) -> None:
    """Refuses a block that changes what it gets: the second run would begin with what the first has left."""
    after = contents(call, tensors)
    if after[0] != before[0]:
        raise ModelError(
            "A streamed block changes one of its arguments in place, and is computed again from what it got.",
            "Write `x = x + ...` instead of `x += ...` in the block.",
        )
    if after[1] != before[1]:
        raise ModelError(
            "A streamed block changes an object that it gets (a cache?), and computing it twice changes it twice.",
            "Pass none while you train: with models of Hugging Face `use_cache=False` and no `past_key_values`.",
        )


def buffers_of(block: nn.Module) -> Buffers:
    """The block's buffers as they are, to be compared after it has run."""
    buffers = [(name, each) for name, each in block.named_buffers() if not each.is_meta and not each.is_inference()]
    return [(name, buffer, buffer._version) for name, buffer in buffers]


def require_steady(block: nn.Module, before: Buffers, again: Callable[[], Any]) -> None:
    """Refuses a block that counts its runs in a buffer: there are two in each step.

    A buffer that is the same after another run, such as angles computed when they are first needed, may have changed.

    Args:
        before: `buffers_of` before its first run.
        again: Runs it once more.
    """
    after = buffers_of(block)
    if not after or _identities(after) == _identities(before):
        return
    values = {name: buffer.clone() for name, buffer, _ in after}
    device = next(iter(values.values())).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        again()
    changed = [name for name, buffer, _ in buffers_of(block) if not _same(values.get(name), buffer)]
    if changed:
        raise ModelError(
            f"A streamed block changes its buffer `{changed[0]}` whenever it runs, and it runs twice in each step: "
            "running statistics and spectral norms would be wrong.",
            "Put that part in eval() or remove it, keep it outside the blocks, or keep the whole model on one device.",
        )


def require_closed(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Refuses a graph of a block that reaches other tensors than it was given: these would get no gradient.

    Args:
        outputs: What the block computed, with its graph.
        leaves: Its arguments and weights.
    """
    known = {id(leaf) for leaf in leaves}
    waiting = [output.grad_fn for output in outputs]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if node is None:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise ModelError(
                "A streamed block has gradient checkpointing with `use_reentrant=True` inside, which torch does not "
                "allow there.",
                "Switch checkpointing off, as by `model.gradient_checkpointing_disable()`: a streamed model computes "
                "its blocks again by itself.",
            )
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in known:
            raise ModelError(
                f"A streamed block uses a tensor of {tuple(variable.shape)} that needs a gradient and is neither an "
                "argument nor a parameter of the block: it would get none.",
                "Pass it to the block as an argument, or register it in the block.",
            )
        following = {each for each, _ in node.next_functions} - seen
        seen |= following
        waiting += following


def require_nothing_left(block: nn.Module) -> None:
    """Refuses a block that has left a part of its graph in an attribute: in the run that a loss sees there is none."""
    for path, module in block.named_modules():
        hooked = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}  # torch's weight_norm
        for name, value in module.__dict__.items():
            if name in _OF_MODULES or name in hooked:
                continue
            if any(each.requires_grad and not each.is_leaf for each in tensors_in(value, objects=False)):
                raise ModelError(
                    f"A streamed block leaves a tensor in its attribute `{path + '.' if path else ''}{name}`, and a "
                    "loss made of it would have no gradient.",
                    "Return it as one of the block's results; detach it if it is only looked at.",
                )


_OF_MODULES = frozenset(nn.Module().__dict__)


def refuse_captured(model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    """A hook before the forward of a whole model: refuses what Hugging Face's models take out of their blocks."""
    if not torch.is_grad_enabled():
        return
    config = getattr(model, "config", None)
    for flag, remedy in CAPTURED.items():
        asked = kwargs.get(flag)
        if asked if asked is not None else getattr(config, flag, False):
            raise ModelError(
                f"`{flag}` takes tensors out of the blocks of a streamed model by hooks, where they have no gradient.",
                f"Set it to False; {remedy}.",
            )


def tensors_in(value: Any, objects: bool = True) -> Iterator[Tensor]:
    """Every tensor in containers and, unless they are left out, in the attributes of objects; not in modules."""
    waiting, seen = deque([(value, 0)]), set[int]()
    while waiting:
        found, depth = waiting.popleft()
        if isinstance(found, Tensor):
            yield found
        elif id(found) not in seen and depth < DEEPEST and not isinstance(found, (nn.Module, type, *PLAIN[1:])):
            seen.add(id(found))
            waiting.extend((each, depth + 1) for each in _inside(found, objects))


def _inside(value: Any, objects: bool) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if not objects or callable(value):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _version(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _identities(buffers: Buffers) -> list[tuple[str, int, int]]:
    return [(name, id(buffer), version) for name, buffer, version in buffers]


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and torch.equal(one, other)
