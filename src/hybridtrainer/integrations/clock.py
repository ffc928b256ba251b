"""Optimizer and scheduler between two owners: the host's loop keeps them, and HybridTrainer is who moves them."""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import GradScaler


class Idle:
    """Stands where a host keeps its optimizer or scheduler: everything is let through but `step`, which is made.

    >>> class Clock:
    ...     ticks = 3
    ...     def step(self): self.ticks += 1
    >>> idle = Idle(Clock())
    >>> idle.step(); idle.ticks
    3
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # asked for before it is there, as `copy` does
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing: HybridTrainer has made the step."""


class IdleOnce(Idle):
    """An `Idle` that makes the step itself where HybridTrainer has made none since the last time.

    Attributes:
        made: Whether HybridTrainer has made one. Whoever has it do so says so.

    >>> class Clock:
    ...     ticks = 3
    ...     def step(self): self.ticks += 1
    >>> idle = IdleOnce(Clock())
    >>> idle.made = True
    >>> idle.step(); idle.ticks
    3
    >>> idle.step(); idle.ticks
    4
    """

    made = False

    def step(self, *arguments: Any, **named: Any) -> None:
        """Nothing, or what was not made."""
        if not self.made:
            self.inner.step(*arguments, **named)
        self.made = False


def unwrapped(thing: Any) -> Any:
    """What an `Idle` stands for; anything else as it is."""
    return thing.inner if isinstance(thing, Idle) else thing


def noticed(scaler: GradScaler | None, optimizer: Any) -> GradScaler | None:
    """The scaler, where Accelerate notices that it withholds an update: a fused optimizer is called all the same."""
    return None if getattr(optimizer, "_step_supports_amp_scaling", False) else scaler


class HostScheduler:
    """A host's scheduler as HybridTrainer sees it: moved with the clock, put back with a jump that is undone.

    Args:
        inner: The host's own.
        moves: Whether the clock moves it. One that waits for evaluations or epochs is moved by the host, and is only
            put back here.
        scaler: A loss scaler, where the host does not move a scheduler in a step whose update the scaler has withheld.
    """

    def __init__(self, inner: Any, *, moves: bool = True, scaler: GradScaler | None = None) -> None:
        self._schedulers = [inner]  # where a checkpoint looks for the name of what is inside
        self._moves = moves
        self._scaler = scaler
        self._scale: float | None = None

    def before_step(self) -> None:
        """Remembers the loss scale, which falls where an update is withheld."""
        self._scale = None if self._scaler is None else self._scaler.get_scale()

    def step(self) -> None:
        """One step of the clock."""
        if self._scaler is not None and self._scale is not None and self._scaler.get_scale() < self._scale:
            self._scale = None  # what is asked for after that, as when looking ahead, is no withheld step
            return
        if not self._moves:
            return
        scheduler = self._schedulers[0]
        if hasattr(scheduler, "optimizer"):
            scheduler.optimizer._opt_called = True  # torch warns where it has not seen a step of the host's optimizer
        scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The host's own."""
        state: dict[str, Any] = self._schedulers[0].state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the host's own."""
        self._schedulers[0].load_state_dict(state)
