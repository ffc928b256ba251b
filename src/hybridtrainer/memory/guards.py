"""A streamed model stays as it was placed: what would move, copy, freeze or replace its weights is refused.

Its engine knows where each weight lives. A weight that torch puts somewhere else is not trained any more, and a copy
of a block would run in the engine of the original: both would go on without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hybridtrainer.errors import ModelError
from hybridtrainer.memory.units import Unit

GUARDS = ("_apply", "__deepcopy__", "__reduce_ex__")


def guard(model: nn.Module, optimizer: object, device: torch.device) -> None:
    """Lets no module of the model be moved, given another type, copied or pickled.

    Args:
        model: The whole model, placed.
        optimizer: Its own. A copy that leaves this out, because its memo names it, has no engine and may be made.
        device: Where blocks are computed: what would move the model there has nothing to do.
    """
    for module in model.modules():
        _guard_module(module, optimizer, device)
    model.register_load_state_dict_pre_hook(_refuse_assigned)  # type: ignore[no-untyped-call]


def guard_block(block: nn.Module, unit: Unit) -> None:
    """Lets a block run only while its parameters are those that were placed, frozen or not as they were."""
    placed, run = _Placed(block, unit), block.forward

    @wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        placed.require()
        return run(*args, **kwargs)

    block.forward = forward


def _guard_module(module: nn.Module, optimizer: object, device: torch.device) -> None:
    def apply(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if _only_moves(module, fn, recurse, device):
            return module
        applied: nn.Module = type(module)._apply(module, fn, recurse)  # type: ignore[no-untyped-call]
        return applied

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        if id(optimizer) not in memo:
            refuse_copy()
        guards = {name: module.__dict__.pop(name) for name in GUARDS}
        try:
            return copy.deepcopy(module, memo)
        finally:
            module.__dict__.update(guards)

    module.__dict__.update(zip(GUARDS, (apply, deepcopy, refuse_pickle), strict=True))


def refuse_copy(*_: Any) -> NoReturn:
    """Instead of a copy that would train the original."""
    raise ModelError(
        "A streamed model, its parts and its optimizer cannot be copied: the blocks of the copy would run in the "
        "engine of the original, and train it.",
        "Keep `state_dict()`, or build and `stream` a second model and load that into it; averages of the weights are "
        'made by `readout = "averaged"`.',
    )


def refuse_pickle(*_: Any) -> NoReturn:
    """Instead of torch's complaint about a local function."""
    raise ModelError(
        "A streamed model, its parts and its optimizer cannot be pickled: the engine that trains them belongs to this "
        "process.",
        "Use `HybridTrainer.save`, or save `model.state_dict()`, and `model.optimizer.state_dict()` with each tensor "
        "cloned.",
    )


def _only_moves(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool, device: torch.device) -> bool:
    """Whether `fn` would move something to `device`, where blocks are computed anyway, and nothing else.

    It is tried on a small tensor of each kind in the module, so that nothing has changed when it is refused.

    Raises:
        ModelError: if it would put tensors elsewhere, or others in their place.
    """
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    moves = False
    for kind, of, dims in sorted({(each.dtype, each.device, each.dim()) for each in tensors}, key=str):
        probe = torch.empty((2,) * dims, dtype=kind, device=of)
        before = probe.data_ptr()
        with torch.no_grad():
            found = fn(probe)
        if found is probe and probe.data_ptr() == before:
            continue
        if found.device == of or found.device != device or found.dtype != kind:
            after = "be stored anew" if _of(found) == _of(probe) else f"become {_of(found)}"
            raise ModelError(
                f"A streamed model can be neither moved nor given another type or storage (here {_of(probe)} would "
                f"{after}): its engine would go on with the weights where they were.",
                "Leave it where it is: the device is that of `stream(device=...)`, the type that of `memory.mode`. For "
                "a model elsewhere take `state_dict()`.",
            )
        moves = True
    return moves


def _of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _refuse_assigned(_: nn.Module, __: Any, ___: str, metadata: dict[str, Any], *____: Any) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise ModelError(
            "load_state_dict(assign=True) would replace the weights of a streamed model, and its engine would go on "
            "with the old ones.",
            "Leave `assign` out: then values are copied to where they live.",
        )


class _Placed:
    """The parameters of a block as they were placed. Asked at each visit of the block, so it only compares."""

    def __init__(self, block: nn.Module, unit: Unit) -> None:
        self._block, self._unit = block, unit
        modules, entries = list(block.modules()), unit.layout.entries
        self._places, self._modules = _places(modules), _contents(modules)
        self._trainable = [(each, entry.trainable) for entry, each in zip(entries, unit.parameters, strict=True)]

    def require(self) -> None:
        """Raises ModelError if a parameter was replaced, added or taken away, or in training frozen or unfrozen."""
        for parameters, leaf, parameter in self._places:
            if parameters.get(leaf) is not parameter:
                self._refuse()
        if torch.is_grad_enabled():
            for parameter, trainable in self._trainable:
                if parameter.requires_grad is not trainable:
                    self._refuse()
        for children, known, parameters, count in self._modules:
            if len(parameters) != count or list(children.values()) != known:
                self._look_again()
                break

    def _look_again(self) -> None:
        """A part without parameters may be replaced, such as dropout."""
        modules = list(self._block.modules())
        now = _places(modules)
        if {(id(each), leaf) for each, leaf, _ in now} != {(id(each), leaf) for each, leaf, _ in self._places}:
            self._refuse()
        self._places, self._modules = now, _contents(modules)

    def _refuse(self) -> NoReturn:
        raise ModelError(
            f"Block {self._unit.key} is not as it was when it was streamed: {self._difference()}. Its engine would go "
            "on training what it was.",
            "Freeze, add and replace parameters before `stream`: build the model anew, change it, stream it, and load "
            "the weights of this one (`state_dict()`).",
        )

    def _difference(self) -> str:
        now = {id(each): name for name, each in self._block.named_parameters()}
        for entry, parameter in zip(self._unit.layout.entries, self._unit.parameters, strict=True):
            if now.pop(id(parameter), None) is None:
                return f"its parameter `{entry.name}` was replaced"
            if parameter.requires_grad is not entry.trainable:
                return f"its parameter `{entry.name}` was {'frozen' if entry.trainable else 'frozen and is not now'}"
        return f"it has another parameter, `{min(now.values())}`" if now else "its parameters are in other places"


def _places(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
    return [
        (each._parameters, leaf, parameter)
        for each in modules
        for leaf, parameter in each._parameters.items()
        if parameter is not None
    ]


def _contents(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], list[Any], dict[str, Any], int]]:
    """Of each module its parts, live and as they are, and how many parameters it has."""
    return [(each._modules, list(each._modules.values()), each._parameters, len(each._parameters)) for each in modules]
