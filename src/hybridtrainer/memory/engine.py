"""Blocks pass through a small device: fetched, computed, in the backward pass updated and sent home.

    forward   fetch weights, run without a graph, keep the input
    backward  fetch weights and states, run again with a graph, take the gradients, check, update, send home

The order is known, so what comes next is fetched while this is computed. With deferred updates the gradients are sent
home instead, and the update is made when the block is next fetched: then the global norm is known, and a bad step
leaves no trace. No gradient of a block ever stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from hybridtrainer.errors import ModelError, torn_step
from hybridtrainer.kernels.reference import Hyper
from hybridtrainer.memory.body import Body, Surroundings, get_random
from hybridtrainer.memory.calls import Call, Result, samples_of
from hybridtrainer.memory.chunks import Chunks
from hybridtrainer.memory.inputs import DeviceInputs, Inputs, Kept
from hybridtrainer.memory.lanes import Lanes
from hybridtrainer.memory.places import Slot
from hybridtrainer.memory.post_mortem import BACKWARD_OF_A_BLOCK, FORWARD_OF_A_BLOCK, IN_AN_UPDATE, explained
from hybridtrainer.memory.rings import Rings
from hybridtrainer.memory.units import Due, PortionKey, Unit
from hybridtrainer.memory.updates import Gatherer, Updates, apply_
from hybridtrainer.memory.views import states_in, targets_in, trainable_in, weights_in


class Engine:
    """Runs the blocks of one model.

    Args:
        blocks: Units of the blocks, in order.
        bodies: Their forward functions.
        lanes: Copies inward and outward.
        rings: Slots on the device; with one for parked gradients updates are deferred.
        inputs: Where block inputs wait.
        updates: What decides and makes updates.
        split: Parts into which the samples of a batch are divided inside each block.

    Attributes:
        is_link_bound: Whether steps were seen to wait for copies, so that what fits stays on the device.
        deferred: Whether updates wait until a block is next fetched.
        depth: How many blocks are computed, from the first: all, but for a model that has yet to grow.
    """

    def __init__(
        self,
        device: torch.device,
        blocks: Sequence[Unit],
        bodies: Sequence[Body],
        lanes: Lanes,
        rings: Rings,
        inputs: Inputs,
        updates: Updates,
        split: int = 1,
    ) -> None:
        self.device = device
        self.blocks = tuple(blocks)
        self.lanes = lanes
        self.updates = updates
        self.rings = rings
        self.chunks = Chunks(device, split, lambda: rings.release(self._in_use))
        self.touched: list[int] = []  # units that this step has updated, in order
        self.torn = False  # whether an update has failed half-way
        self._bodies = tuple(bodies)
        self._weights, self._states, self._gradients = rings.weights, rings.states, rings.gradients
        self._inputs = inputs
        self._last_order: list[PortionKey] = []  # in which states were used in the last step
        self._order: list[PortionKey] = []  # and in this one
        self._versions = {unit.key: (unit.weights.version(), unit.states.version()) for unit in blocks}
        self._gather = Gatherer()
        self.deferred = rings.gradients is not None
        self.is_link_bound = False
        self.depth = len(self.blocks)
        self._in_use: tuple[int, ...] = ()
        self._settled = True
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def keep_on_device(self, spare_bytes: int, states: bool = True) -> int:
        """Uses more of the device's memory, so that less is copied, and fetches states as early as there is room.

        Weights of blocks stay first, and then states, if these may. Returns what is left.
        """
        self.is_link_bound = True
        portions = [key for unit in self.blocks for key in unit.portions] if states else []
        return self.rings.keep(spare_bytes, [unit.key for unit in self.blocks], portions)

    def stop_copies(self) -> None:
        """Leaves out all copies from now on, to see what they cost. The model is worthless afterwards."""
        self.settle()
        for ring in self.rings:
            ring.stop_copies()
        self._inputs = DeviceInputs()

    def forward(
        self, index: int, call: Call, tensors: Sequence[Tensor], graph: bool
    ) -> tuple[Result, list[Tensor], Surroundings]:
        """A block's result without a graph; `graph` says whether a backward pass will follow."""
        if self.torn:
            raise torn_step(len(self.touched))
        unit = self.blocks[index]
        later = range(index + 1, self.depth)
        turn = reversed(range(self.depth)) if graph else range(self.depth)
        slot = self._bring(unit, [*chain(later, turn)])
        if graph and not self.deferred and (self.is_link_bound or self._weights.has(later)):
            self._states.prefetch(self._last_order)
        run = partial(self._bodies[index].forward, weights_in(slot, unit.layout), call, tensors)
        chunk, random = self.chunks.size(samples_of(tensors)), get_random(self.device)
        (result, outputs), chunk = self.chunks.attempt(chunk, True, random, run, FORWARD_OF_A_BLOCK)
        self._weights.used(slot)
        return result, outputs, Surroundings.of(self.device, random, chunk)

    def keep(self, tensors: Sequence[Tensor]) -> Kept:
        """Keeps a block's input for its backward pass."""
        return self._inputs.keep(tensors)

    def backward(
        self, index: int, call: Call, tensors: Sequence[Tensor], needs_grad: Sequence[bool],
        surroundings: Surroundings, output_grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients of a block's input. The block is updated, or its gradients are parked."""
        unit = self.blocks[index]
        if index in self.touched and not self.deferred:
            raise ModelError(
                "A block of a streamed model had a second backward pass in one step, after the first had updated it.",
                "Call `model.optimizer.step()` after each backward pass. Where the model uses a block twice, use "
                '`MemoryConfig(clipping="exact")`, which keeps gradients until the step ends.',
            )
        slot = self._bring(unit, [*chain(reversed(range(index)), range(self.depth))])
        weights = weights_in(slot, unit.layout)
        trainable = [entry.trainable for entry in unit.layout.entries]
        random = get_random(self.device)

        def gradients(chunk: int) -> tuple[list[Tensor | None], list[Tensor]]:
            with surroundings.again(random):
                return self._bodies[index].gradients(weights, trainable, call, tensors, needs_grad, output_grads, chunk)

        divisible = not surroundings.drew_random_numbers
        chunk = min(surroundings.chunk_samples, self.chunks.size(samples_of(tensors)) if divisible else 1 << 62)
        (of_inputs, found), _ = self.chunks.attempt(chunk, divisible, random, gradients, BACKWARD_OF_A_BLOCK)
        if not found:
            self._weights.used(slot)
        elif self.deferred:
            self._park(unit, self.updates.averaged(found))
            self._weights.used(slot)
        else:
            self._weights.may_write(slot)
            self._commit(unit, targets_in(slot, unit.layout), self.updates.averaged(found))
            self._weights.write_back(slot)
        return of_inputs

    def update_lone(self, unit: Unit) -> None:
        """Updates a parameter outside the blocks from its gradient, which is then freed."""
        ((_, parameter),) = unit.trainable
        if parameter.grad is None:
            return
        self._commit(unit, [parameter.data], self.updates.averaged([parameter.grad]))
        parameter.grad = None

    def update_with(self, unit: Unit, scale: Tensor) -> None:
        """Updates a parameter outside the blocks with a given factor of its gradient."""
        ((_, parameter),) = unit.trainable
        if parameter.grad is None:
            return
        self._update(unit, [parameter.data], [parameter.grad], self._count_update(unit), scale, self.updates.yes, [])

    @contextmanager
    def torn_on_error(self) -> Iterator[None]:
        """For what must be done as a whole: where it is not, nothing goes on before a checkpoint is loaded."""
        torn, self.torn = self.torn, True
        yield
        self.torn = torn

    def end_step(self) -> dict[int, bool]:
        """Ends a fused step. Returns which units were really updated; the others were not finite."""
        updated = self.updates.end()
        if self.touched:
            self._last_order = self._order
        self.touched, self._order = [], []
        return updated

    def settle(self) -> None:
        """Makes what is due and brings everything home: afterwards host memory has the model."""
        if self._settled:
            return
        if self.torn:  # what would be brought home is worth nothing
            self._weights.unpack_home()
            return
        for unit in self.blocks:
            if unit.due is not None:
                self._bring(unit, [])
        for ring in self.rings:
            ring.bring_home()
        self.lanes.finish()
        self._settled = True

    def doubt(self) -> None:
        """Fetches everything anew from now on: somebody may write where no version counter sees it, as `.data` does.

        Everything is home by then, and nothing is packed there.
        """
        for ring in () if self.torn else self.rings:
            ring.drop()

    def forget(self) -> None:
        """What is on the device is out of date, and what was due is not any more."""
        self._weights.unpack_home()
        for ring in self.rings:
            ring.drop()
        for unit in self.blocks:
            unit.due, unit.is_parked = None, False
        self.touched, self._order, self.torn = [], [], False
        self.updates.begin()

    def _bring(self, unit: Unit, upcoming: Sequence[int]) -> Slot:
        """A block's weights on the device, up to date; those of the next ones are on their way."""
        key = unit.key
        self._drop_if_written(unit)
        self._in_use = (key,)
        slot = self._weights.take(key, in_use=(key,))
        if unit.due is not None:
            self._make_due(unit, slot, upcoming)
        self._weights.prefetch(upcoming, in_use=(key,))
        return slot

    def _drop_if_written(self, unit: Unit) -> None:
        """Forgets what was fetched before somebody wrote into host memory."""
        key, versions = unit.key, (unit.weights.version(), unit.states.version())
        before = self._versions.get(key, (-1, -1))
        if versions[0] != before[0]:
            self._weights.drop(key)
        for portion in unit.portions if versions[1] != before[1] else ():
            self._states.drop(portion)
        self._versions[key] = versions

    def _commit(self, unit: Unit, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The fused update of a unit whose weights are on the device; its states are fetched and sent home."""
        norm = self.updates.measure(unit, gradients)
        scale, ok = self.updates.admit(unit, norm)
        self.touched.append(unit.key)
        hyper = self._count_update(unit)
        # Most steps use states in the order of the last one; where a step does not, they are only fetched later.
        following = self._last_order[len(self._order) + len(unit.portions) :]
        self._update(unit, weights, gradients, hyper, scale, ok, following)
        self._order += unit.portions

    def _count_update(self, unit: Unit) -> tuple[Hyper, ...]:
        """Counts one more update of a unit. Returns the settings of each of its targets."""
        unit.steps += 1
        steps = int(unit.steps)
        return tuple(self.updates.hyper(parameter, steps) for _, parameter in unit.targets)

    def _update(
        self, unit: Unit, weights: Sequence[Tensor], gradients: Sequence[Tensor], hyper: Sequence[Hyper],
        scale: Tensor, ok: Tensor, following: Sequence[PortionKey],
    ) -> None:  # fmt: skip
        """Updates a unit, one portion of its states after the other; those that are used next are on their way."""
        self._settled = False
        self._drop_if_written(unit)
        upcoming = [*unit.portions, *following]
        with torch.no_grad(), self.torn_on_error(), explained(IN_AN_UPDATE):
            for number, (key, portion) in enumerate(unit.portions.items(), start=1):
                slot = self._states.take(key, in_use=(key,))
                self._states.may_write(slot)
                states = states_in(slot, portion)
                apply_(portion, states, unit.layout.targets, weights, gradients, hyper, scale, ok, self._gather)
                self._states.write_back(slot)
                self._states.prefetch(upcoming[number:])

    def _park(self, unit: Unit, gradients: Sequence[Tensor]) -> None:
        assert self._gradients is not None
        ring = self._gradients
        slot = ring.take(unit.key) if unit.is_parked else ring.claim(unit.key)
        ring.may_write(slot)
        views = trainable_in(slot, unit.layout)
        with torch.no_grad():
            for view, gradient in zip(views, gradients, strict=True):
                if unit.is_parked:
                    view.add_(gradient)
                else:
                    view.copy_(gradient)
        unit.is_parked = True
        self.updates.measure(unit, views)
        ring.send_home(slot)

    def make_due(self, scale: Tensor) -> None:
        """Decides the update of all parked gradients; each is made when its block is next fetched."""
        for unit in self.blocks:
            if unit.is_parked:
                unit.due, unit.is_parked = Due(scale, self._count_update(unit)), False
                self._settled = False

    def discard_parked(self) -> None:
        """Forgets the gradients of this step."""
        for unit in self.blocks:
            unit.is_parked = False

    def _make_due(self, unit: Unit, slot: Slot, upcoming: Sequence[int]) -> None:
        assert self._gradients is not None
        assert unit.due is not None
        due = unit.due
        self._weights.may_write(slot)
        gradients = self._gradients.take(unit.key, in_use=(unit.key,))
        weights, found = targets_in(slot, unit.layout), trainable_in(gradients, unit.layout)
        waiting = [key for key in upcoming if self.blocks[key].due is not None]
        following = [key for index in waiting for key in self.blocks[index].portions]
        with self.torn_on_error():
            self._update(unit, weights, found, due.hyper, due.scale, self.updates.yes, following)
            unit.due = None
            self._gradients.used(gradients)
            self._weights.write_back(slot)
        self._gradients.prefetch(waiting)
