"""Hooks: objects whose methods are called at named moments of a run.

A hook may have any of the methods in `EVENTS`; each receives the trainer first. A hook that raises is named, and
its policy decides what follows. This module does not know the trainer.

    class PrintJumps:
        def after_jump(self, trainer, record): print(record.verdict, record.reason)

    trainer = HybridTrainer(model, optimizer, loss_fn, hooks=[PrintJumps()])
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal, get_args

from hybridtrainer.errors import HookError
from hybridtrainer.randomness import RandomState

EVENTS: dict[str, str] = {
    "before_step": "trainer, batch: a step begins, of any phase",
    "before_forward": "trainer, batch: the forward pass of a real step begins; once per micro-batch",
    "after_backward": "trainer: gradients are complete and not yet clipped",
    "before_jump": "trainer, forecast: weights are about to be displaced",
    "after_jump": "trainer, record: a jump was accepted, refused, kept or rolled back",
    "on_phase_change": "trainer, change: the phase machine moved, with its reason",
    "on_checkpoint": "trainer, folder: a checkpoint is in place",
    "on_error": "trainer, error: a step is about to raise this error",
}
"""Every event with the arguments its method receives."""

Policy = Literal["raise", "skip", "disable"]

ENTRY_POINT_GROUP = "hybridtrainer.hooks"


@dataclass
class _Registered:
    hook: object
    name: str
    policy: Policy
    active: bool = True


class Hooks:
    """The hooks of one trainer.

    A hook's policy says what its own failure does: "raise" stops the run with a `HookError`, "skip" warns and
    calls it again next time, "disable" warns and never calls it again. When a failure does not stop the run, the
    random state is put back, so that the run goes on as if the hook had not been called.
    """

    def __init__(self, hooks: Iterable[object] = (), names: Iterable[str] = ()) -> None:
        self._by_event: dict[str, list[_Registered]] = {event: [] for event in EVENTS}
        for hook in hooks:
            self.add(hook)
        for name in names:
            self.add(_load(name), policy="disable", name=name)

    def add(self, hook: object, policy: Policy = "raise", name: str | None = None) -> None:
        """Registers a hook for every event it has a method for.

        Raises:
            HookError: if it has none, or a method whose arguments do not fit.
        """
        entry = _Registered(hook, name or type(hook).__name__, policy)
        methods = [event for event in EVENTS if callable(getattr(hook, event, None))]
        if not methods:
            raise HookError(
                f"The hook {entry.name} has none of the methods a hook can have.",
                f"Give it at least one of: {', '.join(EVENTS)}.",
            )
        if policy not in get_args(Policy):
            raise HookError(
                f"The hook {entry.name} was given the policy {policy!r}.", f"Use one of {', '.join(get_args(Policy))}."
            )
        for event in methods:
            wanted = EVENTS[event].partition(":")[0].split(", ")
            try:
                inspect.signature(getattr(hook, event)).bind(*wanted)
            except TypeError as error:
                raise HookError(
                    f"The hook {entry.name} cannot be called: {event} receives ({', '.join(wanted)}).",
                    "Change the method's arguments.",
                ) from error
        for event in methods:
            self._by_event[event].append(entry)

    def hears(self, *events: str) -> bool:
        """Whether any hook is called at one of these moments."""
        return any(entry.active for event in events for entry in self._by_event[event])

    def emit(self, event: str, *arguments: Any) -> None:
        """Calls `event` on every hook that has it, in order of registration."""
        for entry in self._by_event[event]:
            if entry.active:
                self._call(entry, event, arguments)

    def emit_error(self, trainer: object, error: BaseException) -> None:
        """Tells the hooks of an error that is about to be raised; one of their own is noted on it, not raised."""
        try:
            self.emit("on_error", trainer, error)
        except Exception as second:
            error.add_note(f"The on_error hook failed too: {second}")

    def _call(self, entry: _Registered, event: str, arguments: tuple[Any, ...]) -> None:
        before = None if entry.policy == "raise" else RandomState.capture()
        try:
            getattr(entry.hook, event)(*arguments)
        except Exception as error:
            if before is None:
                raise HookError(
                    f"The hook {entry.name} failed in {event}: {type(error).__name__}: {error}.",
                    'Mend it, or register it with policy="disable" to train on without it.',
                ) from error
            before.restore()
            entry.active = entry.policy != "disable"
            fate = "and is switched off" if entry.policy == "disable" else "and was skipped"
            warnings.warn(
                f"The hook {entry.name} failed in {event} {fate}: {type(error).__name__}: {error}", stacklevel=2
            )


def installed_hooks() -> list[str]:
    """Names of the hooks that installed packages offer."""
    return sorted(point.name for point in entry_points(group=ENTRY_POINT_GROUP))


def _load(name: str) -> object:
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            made = point.load()
            return made() if inspect.isclass(made) else made
        except Exception as error:
            raise HookError(
                f"The hook {name} could not be loaded: {error}.", "Reinstall the package it is from."
            ) from error
    known = ", ".join(installed_hooks()) or "none"
    raise HookError(f"No installed package offers a hook named {name}.", f"Installed hooks: {known}.")
