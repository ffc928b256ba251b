"""The optimizer of a streamed model: what schedulers, trainers and checkpoints hold on to.

Most of its work is done in the backward pass, by the engine. `step` ends a step: with fused updates it learns what was
updated, with deferred ones it decides what will be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridtrainer.config_memory import MemoryConfig, size_in_bytes
from hybridtrainer.errors import ForeignCheckpointError, ModelError, torn_step
from hybridtrainer.memory.arena import Arena
from hybridtrainer.memory.engine import Engine
from hybridtrainer.memory.guards import refuse_copy, refuse_pickle
from hybridtrainer.memory.home import StreamedHome
from hybridtrainer.memory.post_mortem import ON_THE_WAY_HOME, explained
from hybridtrainer.memory.residency import Residency
from hybridtrainer.memory.units import Unit
from hybridtrainer.memory.updates import LAST_NORM, Updates
from hybridtrainer.replicas import mean_


class StreamedOptimizer(Optimizer):
    """AdamW whose states live in host memory.

    Its `state` holds views into host memory, so a checkpoint is written from there and read back into it. `torch.save`
    takes its `state_dict()` in the mode fp32 only: elsewhere tensors of several types lie in one run of bytes, and each
    must be cloned first. `HybridTrainer.save` needs no copies. The optimizer itself is neither pickled nor copied.
    Gradients scaled by a `GradScaler` are refused in `step`: fused updates have used them by then.

    Args:
        groups: Parameter groups, or parameters, as any torch optimizer takes them.
        lone: Units of the parameters outside the blocks.
        defaults: lr, betas, eps and weight_decay of groups that do not set them.
        memory: The settings that it was made with.

    Attributes:
        is_loaded: Whether its state was loaded and no step has ended since.
    """

    _step_supports_amp_scaling = True  # so that a GradScaler shows itself to `step`, which refuses it

    def __init__(
        self,
        groups: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        blocks: Sequence[Unit],
        lone: Sequence[Unit],
        make_engine: Callable[[list[dict[str, Any]]], Engine],
        arena: Arena,
        memory: MemoryConfig,
    ) -> None:
        self._is_set_up = self.is_loaded = False
        super().__init__(groups, defaults)
        for group in self.param_groups:
            group.setdefault(LAST_NORM, None)
        self.lone = tuple(lone)
        for unit in (*blocks, *lone):
            for parameter, state in unit.optimizer_state().items():
                self.state[parameter] = state
        self.engine = make_engine(self.param_groups)
        self.host_bytes = arena.nbytes
        self._arena = arena
        self.memory = memory
        self._residency = Residency(self.engine, size_in_bytes(memory.vram), memory.pack_weights)
        for unit in (*blocks, *lone):
            for entry, parameter in unit.trainable:
                low = self.state[parameter].get("low")
                parameter.home = StreamedHome(parameter, entry.format, low, self.engine)  # type: ignore[attr-defined]
        for unit in lone:
            for _, parameter in unit.trainable:
                deferred = partial(_average, parameter)
                work = deferred if self.engine.deferred else partial(self.engine.update_lone, unit)
                _call_with_gradient(parameter, work)
        self._is_set_up = True

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Views of all states, brought home first: a copy on its way would overwrite what somebody writes there."""
        if self._is_set_up:
            self.settle()
        return self._state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self._state = state

    def uncollected_state(self) -> Mapping[Tensor, Any]:
        """The same as it is, for those who only count: some of it may be on its way."""
        return self._state

    @property
    def updates(self) -> Updates:
        """Clipping and the norm."""
        return self.engine.updates

    @property
    def deferred(self) -> bool:
        """Whether a step that is not finite leaves no trace, and micro-batches can be summed."""
        return self.engine.deferred

    def gradient_norm(self) -> Tensor:
        """The global norm of this step's gradients, on the device."""
        if self.deferred:
            for unit in self.lone:
                gradients = [parameter.grad for _, parameter in unit.trainable if parameter.grad is not None]
                if gradients:
                    self.updates.measure(unit, gradients)
        return self.updates.norm()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Ends the step. Gradients that are not finite change nothing more.

        Raises:
            ModelError: if a GradScaler has scaled the gradients; where updates were made with them, the step is torn.
            TornStepError: where the backward pass has failed with some blocks updated and others not.
        """
        if closure is not None:
            raise TypeError("a streamed optimizer takes no closure: the update is part of the backward pass")
        if hasattr(self, "grad_scale"):
            self._refuse_scaled()
        if self.engine.torn:
            raise torn_step(len(self.engine.touched))
        self.is_loaded = False
        if self.deferred:
            self.gradient_norm()
            if self.updates.is_finite():
                scale = self.updates.exact_factor()
                with self.engine.torn_on_error():
                    self.engine.make_due(scale)
                    for unit in self.lone:
                        self.engine.update_with(unit, scale)
            else:
                self.engine.discard_parked()
            self.updates.begin()
            self._residency.after_step()
            return None
        self._end_fused()
        return None

    def _end_fused(self) -> int:
        """Ends a step whose updates were part of the backward pass; returns how many units were really updated."""
        ended = self.engine.end_step()
        for key, was_updated in ended.items():
            if not was_updated:
                self._unit(key).steps -= 1
        self._residency.after_step()
        return sum(ended.values())

    def _refuse_scaled(self) -> NoReturn:
        for left in ("grad_scale", "found_inf"):  # by the scaler, which takes them away after a step only
            self.__dict__.pop(left, None)
        self.give_up()
        done = "the weights are updated with scaled gradients already" if self.engine.torn else "nothing was changed"
        raise ModelError(
            f"A GradScaler has scaled the gradients of a streamed model, which does not read its scale; {done}.",
            "Train without it: streamed blocks compute in bf16 or fp32. "
            + ("Load the last checkpoint, or build the model anew." if self.engine.torn else ""),
        )

    def skip(self) -> int:
        """Ends the step without an update, as far as none was made; returns how many parts of the model had theirs."""
        if not self.deferred:
            return self._end_fused()
        self.engine.discard_parked()
        self.updates.begin()
        return 0

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  # a zero would be an update
        """Frees the gradients of the parameters outside the blocks; those of the blocks do not stay."""
        super().zero_grad(set_to_none=True)
        if self.deferred:
            self.engine.discard_parked()

    def give_up(self) -> None:
        """A step has failed: where it has updated something, nothing goes on before a checkpoint is loaded."""
        self.engine.torn = self.engine.torn or bool(self.engine.touched)
        self.zero_grad()
        self.updates.begin()

    def compute_first(self, blocks: int) -> None:
        """From now on only so many blocks are computed, from the first; the others are not fetched."""
        self.engine.depth = blocks

    def settle(self) -> None:
        """Brings everything home: afterwards parameters and states in host memory are the model, to read or write."""
        with explained(ON_THE_WAY_HOME):
            self.engine.settle()
        self.engine.doubt()

    def settle_whole(self) -> None:
        """Brings everything home for somebody who will keep it.

        Raises:
            TornStepError: when some blocks are updated and others are not.
        """
        if self.engine.touched or self.engine.torn:
            raise torn_step(len(self.engine.touched))
        self.settle()

    def forget(self) -> None:
        """Parameters or states were replaced: what is on the device, or due, is not valid any more."""
        self.engine.forget()

    def state_dict(self) -> dict[str, Any]:
        """The state, with live tensors, brought home first.

        Raises:
            TornStepError: in the middle of a step, when some blocks are updated and others are not.
        """
        self.settle_whole()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a state into host memory, from where it is fetched; torch's own would put it beside.

        Raises:
            ForeignCheckpointError: if it is of another model or mode; then nothing is changed.
        """
        self.settle()
        live = super().state_dict()
        if _shapes(live) != _shapes(state_dict):
            raise ForeignCheckpointError(
                "The optimizer state is of another model, other parameter groups or another `memory.mode`.",
                "Stream the model as it was when the state was saved.",
            )
        for index, values in state_dict["state"].items():
            for name, value in values.items():
                live["state"][index][name].copy_(value)
        for group, values in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in values.items() if name != "params"})
        self.forget()
        self.is_loaded = True

    def close(self) -> None:
        """Takes back what CUDA knows of the host memory; the model cannot be trained afterwards."""
        self.engine.lanes.finish()
        self._arena.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch has it while the optimizer is made.

        Raises:
            ModelError: afterwards: nothing would update the group.
        """
        if self._is_set_up:
            raise ModelError(
                "A streamed optimizer takes no more parameter groups: what is updated, and in which order it travels, "
                "was settled by `stream`.",
                "Pass all groups to `stream(param_groups=...)`, or train the new parameters with another optimizer.",
            )
        super().add_param_group(param_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickle()

    def _unit(self, key: int) -> Unit:
        blocks = self.engine.blocks
        return blocks[key] if key < len(blocks) else self.lone[key - len(blocks)]


def _shapes(state_dict: dict[str, Any]) -> Any:
    states = {
        index: {name: (value.shape, value.dtype) for name, value in values.items()}
        for index, values in state_dict["state"].items()
    }
    return states, [group["params"] for group in state_dict["param_groups"]]


def _average(parameter: nn.Parameter) -> None:
    """Makes a gradient that of all ranks. What earlier micro-batches left in it is equal on all, and stays as it is."""
    if parameter.grad is not None:
        mean_([parameter.grad])


def _call_with_gradient(parameter: nn.Parameter, work: Callable[[], None]) -> None:
    """Calls `work` in each backward pass, once the parameter's gradient is whole: after its last use, if it is tied."""
    parameter.register_post_accumulate_grad_hook(lambda _: work())  # type: ignore[no-untyped-call]
