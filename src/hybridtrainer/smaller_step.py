"""A real step that is made again in smaller parts when GPU memory runs out, with the same samples in it.

    forward, backward, norm     no weight has changed: everything is put back and done again with half the samples at
                                a time, down to one; what was found stays for the steps that follow
    update                      weights may have changed: nothing is done again, and nothing is trained on or saved
                                until a checkpoint is loaded

Only a loss that is the mean of its parts' losses is divided; that is measured first. The division is part of the run's
state: a resumed run divides as this one did.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hybridtrainer import ranks
from hybridtrainer.buffer_guard import BufferGuard
from hybridtrainer.errors import torn_update
from hybridtrainer.losses import CheckedLoss, samples_in
from hybridtrainer.measure import measure
from hybridtrainer.memory.offload import forget_sent
from hybridtrainer.memory.post_mortem import module_in
from hybridtrainer.parts import TOLERANCE, TOLERANCE_16_BIT, Weighing, divide, find_weighing, may_differ, shares
from hybridtrainer.randomness import RandomState
from hybridtrainer.real_step import UPDATE, Outcome, Part, RealStep, whole
from hybridtrainer.state import Training
from hybridtrainer.tree import Tree

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
IN_AN_UPDATE = "an update cannot be made in parts: the model is between two steps until a checkpoint is loaded"
Callback = Callable[[Any], None]


@dataclass(frozen=True)
class Division:
    """Into how many parts each micro-batch is divided.

    Attributes:
        parts: 1 where it is not.
        weighing: What a part counts by; None while that has made no difference.
    """

    parts: int = 1
    weighing: Weighing | None = None


class NothingSmaller(torch.OutOfMemoryError):
    """Memory ran out in a step that was not divided, or not further.

    Attributes:
        doing: What the step was about.
        module: In whose forward pass it was; empty where that is not known.
        refusal: Why it was not divided further.
        parts: Into how many it was.
    """

    def __init__(self, error: BaseException, doing: str, module: str, refusal: str, division: Division) -> None:
        super().__init__(str(error))
        self.doing, self.module, self.refusal, self.parts = doing, module, refusal, division.parts


class SmallerStep:
    """Makes real steps of a resident model, divided where they do not fit.

    Args:
        training: Model, optimizer and scaler.
        loss: The loss of a micro-batch.
        clip_norm: Largest global gradient norm; None does not clip.
        guard: Puts buffers back before a step is made again; whoever makes a step lets it remember them first.
        allowed: Whether to divide at all.
        say: Told in words of each division.

    Attributes:
        division: That of the steps to come.
    """

    def __init__(
        self, training: Training, loss: CheckedLoss, clip_norm: float | None, guard: BufferGuard,
        allowed: bool, say: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._step = RealStep(training, loss, clip_norm, overlap=not allowed)
        self._model, self._loss, self._guard = training.model, loss, guard
        self._allowed, self._say = allowed, say
        self._norms = [module for module in training.model.modules() if isinstance(module, _BatchNorm)]
        self._has_16_bit_weights = any(each.dtype in SIXTEEN_BIT for each in training.model.parameters())
        # The caller's guard remembers what was before hooks and before a measurement; these two have their own.
        self._since_hooks, self._while_measured = BufferGuard(training.model), BufferGuard(training.model)
        self._torn = False
        self.division = Division()

    def __call__(
        self, micro_batches: Sequence[Any], before_forward: Callback, after_backward: Callable[[], None],
        before: RandomState | None = None,
    ) -> Outcome:  # fmt: skip
        """One optimizer step over the micro-batches, in as many parts as needed.

        Args:
            micro_batches: What the step learns from.
            before_forward: Called with each of them, again if the step is made again.
            after_backward: Called when gradients are complete.
            before: The random state as it is now, where the caller knows it (taking one costs as much as a small model)
                and nobody has changed buffers since they were remembered.

        Raises:
            NothingSmaller: if it does not fit, however small, or has failed in its update.
            TornStepError: if an update has failed before and no checkpoint was loaded since.
        """
        self.require_whole()
        guard = self._guard
        if before is None:
            guard = self._since_hooks
            guard.remember()
        before, division, failed = before or RandomState.capture(), self.division, ""
        while True:
            weigher = _Weigher(division, self._measure, self._tolerance, self._loss.parts_add)
            try:
                outcome = self._step(micro_batches, before_forward, after_backward, weigher.parts_of)
            except torch.OutOfMemoryError as error:
                module, failed = module_in(error, self._model), self._step.doing
                self._torn = failed == UPDATE
                if not self._torn:
                    self._put_back(before, guard, error)
                smaller = IN_AN_UPDATE if self._torn else self._agreed(self._halved(micro_batches, division))
                if isinstance(smaller, str):
                    raise NothingSmaller(error, failed, module, smaller, division) from error
                division = smaller
            except BaseException:
                self._torn = self._step.doing == UPDATE
                raise
            else:
                break
        if division.parts != self.division.parts:
            self._announce(failed, micro_batches, division)
        self.division = self._agreed_weighing(weigher.division)
        return outcome

    def abandon(self, error: BaseException) -> None:
        """Frees what a step that raised has left behind, and lets the other ranks know."""
        self._step.abandon()
        if not self._step.replicas.in_lockstep:  # others would hear of it only when they have given up their pass
            ranks.tell(error)

    def require_whole(self) -> None:
        """Refuses a model that an update has left between two steps.

        Raises:
            TornStepError: until `restore` is called.
        """
        if self._torn:
            raise torn_update()

    @contextmanager
    def torn_by_error(self, where: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Around what belongs to an update: if it fails, nothing is trained on or saved until `restore`.

        Args:
            where: Whether the failure has left something undone.
        """
        try:
            yield
        except BaseException:
            self._torn = self._torn or where()
            raise

    def state(self) -> Tree:
        """The division, for a checkpoint."""
        self.require_whole()
        return asdict(self.division)

    def restore(self, state: Tree) -> None:
        """Goes on with the division of a checkpoint, None where it has none; the weights are whole again."""
        self.division, self._torn = Division(**(state or {})), False

    def _halved(self, micro_batches: Sequence[Any], division: Division) -> Division | str:
        """The next smaller division, or why there is none."""
        largest = max(micro_batches, key=samples_in)
        samples = samples_in(largest)
        halves = divide(largest, 2)
        refusal = ""
        if not self._allowed:
            refusal = "`memory.retry_smaller` is off"
        elif self._step.replicas.sharded:
            refusal = "the weights are sharded, and the other ranks are in the middle of the same pass"
        elif math.ceil(samples / division.parts) <= 1:
            refusal = "that was one sample at a time"
        elif isinstance(halves, str):
            refusal = f"the batch cannot be divided: {halves}"
        elif not self._divisible():
            refusal = "batch norms would see fewer samples at a time, which is another training"
        elif division.parts == 1:
            refusal = self._why_not_a_mean(largest)
        return refusal or replace(division, parts=min(2 * division.parts, samples))

    def _agreed(self, smaller: Division | str) -> Division | str:
        """What all ranks do: none divides further unless all can, and all do alike."""
        if ranks.count() == 1 or self._step.replicas.in_lockstep:
            return smaller
        found = ranks.exchange("division", smaller if isinstance(smaller, str) else smaller.parts)
        refusals = [each for each in found if isinstance(each, str)]
        if refusals or isinstance(smaller, str):
            return refusals[0]
        return replace(smaller, parts=max(each for each in found if isinstance(each, int)))

    def _agreed_weighing(self, division: Division) -> Division:
        """What parts count by, once one rank has found it out."""
        if ranks.count() == 1 or division.parts == 1:
            return division
        found = [each for each in ranks.exchange("weighing", division.weighing) if each is not None]
        return replace(division, weighing=found[0]) if found else division

    def _divisible(self) -> bool:
        return self._allowed and not any(module.training for module in self._norms)

    def _why_not_a_mean(self, batch: Any) -> str:
        """Why the loss of a batch is not the mean of its parts' losses; empty if it is.

        Looked at without gradients, with as many samples as there is memory for.
        """
        while samples_in(batch) > 1:
            try:
                halves = divide(batch, 2)
                assert not isinstance(halves, str)
                if find_weighing(batch, halves, self._measure, self._tolerance) is None:
                    return "the loss of the batch is not the mean of the losses of its parts"
            except torch.OutOfMemoryError:
                batch = halves[0]
                continue
            except Exception as error:
                return f"parts of the batch cannot be computed: {type(error).__name__}: {error}"
            return ""
        return "there is no memory to find out whether the loss is the mean of the losses of its parts"

    def _measure(self, batch: Any) -> float:
        return fmean(measure(self._model, self._loss.values, [batch], self._while_measured, seed=0)[0])

    @property
    def _tolerance(self) -> float:
        return TOLERANCE_16_BIT if self._loss.is_16_bit or self._has_16_bit_weights else TOLERANCE

    def _put_back(self, before: RandomState, guard: BufferGuard, error: BaseException) -> None:
        """Undoes what a step has done before its update, and frees what its frames hold on to."""
        traceback.clear_frames(error.__traceback__)
        self._step.abandon()
        forget_sent(self._model)
        guard.put_back()
        before.restore()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _announce(self, failed: str, micro_batches: Sequence[Any], division: Division) -> None:
        samples = max(map(samples_in, micro_batches))
        at_a_time = math.ceil(samples / division.parts)
        text = (
            f"GPU memory ran out in {failed}: from now on {at_a_time} of {samples} samples are computed at a time, "
            "with the same samples in a step"
        )
        self._say(text)
        warnings.warn(f"{text}.", stacklevel=4)


class _Weigher:
    """Divides micro-batches, and finds out what their parts count by when that first makes a difference."""

    def __init__(self, division: Division, measure: Callable[[Any], float], tolerance: float, parts_add: bool) -> None:
        self.division = division
        self._measure, self._tolerance, self._parts_add = measure, tolerance, parts_add

    def parts_of(self, micro_batch: Any) -> Sequence[Part]:
        """The parts and their shares; the whole where they would have no known share."""
        if self.division.parts == 1:
            return whole(micro_batch)
        pieces = divide(micro_batch, self.division.parts)
        if isinstance(pieces, str) or len(pieces) == 1:
            return whole(micro_batch)
        if self.division.weighing is None and may_differ(pieces):
            found = find_weighing(micro_batch, pieces, self._measure, self._tolerance)
            if found is None:
                return whole(micro_batch)
            self.division = replace(self.division, weighing=found)
        if self._parts_add:
            return [(piece, 1.0) for piece in pieces]
        return list(zip(pieces, shares(pieces, self.division.weighing or "samples"), strict=True))
