"""Hooks: who is called when, and what follows when one fails."""

from __future__ import annotations

import importlib.metadata
import random
import warnings
from typing import Any

import numpy
import pytest
import torch

from hybridtrainer import hooks as hooks_module
from hybridtrainer.errors import HookError
from hybridtrainer.hooks import ENTRY_POINT_GROUP, EVENTS, Hooks, installed_hooks
from hybridtrainer.randomness import RandomState
from hybridtrainer.tree import fingerprint


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def before_step(self, trainer: Any, batch: Any) -> None:
        self.calls.append(("before_step", trainer, batch))

    def after_backward(self, trainer: Any) -> None:
        self.calls.append(("after_backward", trainer))


class Failing:
    """Draws from every generator, then fails."""

    def __init__(self) -> None:
        self.calls = 0

    def before_step(self, trainer: Any, batch: Any) -> None:
        self.calls += 1
        random.random()
        torch.rand(3)
        numpy.random.rand()
        raise ZeroDivisionError("by zero")


def random_state() -> str:
    return fingerprint({"random": RandomState.capture().to_tree()})["random"]


def test_a_hook_is_called_for_the_events_it_has_with_their_arguments():
    recorder = Recorder()
    hooks = Hooks([recorder])
    hooks.emit("before_step", "trainer", "batch")
    hooks.emit("on_checkpoint", "trainer", "folder")
    hooks.emit("after_backward", "trainer")
    assert recorder.calls == [("before_step", "trainer", "batch"), ("after_backward", "trainer")]


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_is_delivered_with_as_many_arguments_as_it_says(event):
    arguments = EVENTS[event].partition(":")[0].split(", ")
    received: list[tuple[Any, ...]] = []
    hook = type("Hook", (), {event: lambda self, *given: received.append(given)})()
    Hooks([hook]).emit(event, *arguments)
    assert received == [tuple(arguments)]


def test_hooks_are_called_in_order_of_registration():
    order: list[str] = []

    def named(name: str) -> object:
        return type("Hook", (), {"after_backward": lambda self, trainer: order.append(name)})()

    hooks = Hooks([named("a"), named("b")])
    hooks.add(named("c"))
    hooks.emit("after_backward", None)
    assert order == ["a", "b", "c"]


def test_a_failing_hook_stops_the_run_by_default_and_is_named():
    hooks = Hooks([Failing()])
    with pytest.raises(HookError, match="The hook Failing failed in before_step: ZeroDivisionError: by zero") as caught:
        hooks.emit("before_step", None, None)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_skipped_hook_is_called_again_next_time():
    failing, recorder, hooks = Failing(), Recorder(), Hooks()
    hooks.add(failing, policy="skip", name="mine")
    hooks.add(recorder)
    for _ in range(2):
        with pytest.warns(UserWarning, match="The hook mine failed in before_step and was skipped: ZeroDivisionError"):
            hooks.emit("before_step", None, None)
    assert failing.calls == 2
    assert len(recorder.calls) == 2  # those after it are called all the same


def test_a_disabled_hook_is_never_called_again_for_any_event():
    class Mixed(Recorder):
        def before_step(self, trainer: Any, batch: Any) -> None:
            super().before_step(trainer, batch)
            raise ZeroDivisionError

    mixed, hooks = Mixed(), Hooks()
    hooks.add(mixed, policy="disable")
    with pytest.warns(UserWarning, match="is switched off"):
        hooks.emit("before_step", None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hooks.emit("before_step", None, None)
        hooks.emit("after_backward", None)
    assert [call[0] for call in mixed.calls] == ["before_step"]


@pytest.mark.filterwarnings("ignore:The hook")
@pytest.mark.parametrize("policy", ["skip", "disable"])
def test_a_failure_that_does_not_stop_the_run_leaves_the_random_state_as_it_was(policy):
    hooks = Hooks()
    hooks.add(Failing(), policy=policy)
    before = random_state()
    hooks.emit("before_step", None, None)
    assert random_state() == before


@pytest.mark.parametrize("policy", ["raise", "skip", "disable"])
def test_what_a_hook_that_works_draws_is_drawn(policy):
    class Drawing:
        def before_step(self, trainer: Any, batch: Any) -> None:
            torch.rand(1)

    hooks = Hooks()
    hooks.add(Drawing(), policy=policy)
    before = random_state()
    hooks.emit("before_step", None, None)
    assert random_state() != before


@pytest.mark.parametrize("policy", ["raise", "skip", "disable"])
def test_an_interrupt_in_a_hook_is_an_interrupt(policy):
    class Interrupted:
        def before_step(self, trainer: Any, batch: Any) -> None:
            raise KeyboardInterrupt

    hooks = Hooks()
    hooks.add(Interrupted(), policy=policy)
    with pytest.raises(KeyboardInterrupt):
        hooks.emit("before_step", None, None)


def test_an_unknown_policy_is_refused():
    with pytest.raises((HookError, ValueError)):
        Hooks().add(Recorder(), policy="ignore")  # type: ignore[arg-type]


def test_something_without_any_hook_method_is_refused():
    class Misspelt:
        before_step = 3

        def after_step(self, trainer: Any) -> None: ...

    for thing in (Misspelt(), object(), lambda trainer: None):
        with pytest.raises(HookError, match="none of the methods"):
            Hooks([thing])


@pytest.mark.parametrize(
    "method",
    [
        lambda self: None,
        lambda self, trainer: None,
        lambda self, trainer, batch, more: None,
        lambda self, trainer, batch, *, more: None,
        lambda self, *, trainer, batch: None,
    ],
)
def test_a_method_that_cannot_take_the_arguments_is_refused_at_registration(method):
    hook = type("Hook", (), {"before_step": method})()
    with pytest.raises(HookError, match=r"before_step receives \(trainer, batch\)"):
        Hooks([hook])


@pytest.mark.parametrize(
    "method",
    [
        lambda self, trainer, batch, more=0: self.calls.append((trainer, batch)),
        lambda self, *anything: self.calls.append(anything),
        lambda self, a, b, **more: self.calls.append((a, b)),
        lambda *anything: anything[0].calls.append(anything[1:]),
    ],
)
def test_a_method_that_can_take_the_arguments_is_called_with_them(method):
    hook = type("Hook", (), {"before_step": method, "calls": []})()
    Hooks([hook]).emit("before_step", "the trainer", "a batch")
    assert hook.calls == [("the trainer", "a batch")]


def test_a_refused_hook_is_not_registered_for_its_other_methods():
    calls: list[str] = []

    class HalfRight:
        def before_step(self, trainer: Any, batch: Any) -> None:
            calls.append("before_step")

        def on_error(self) -> None: ...

    hooks = Hooks()
    with pytest.raises(HookError):
        hooks.add(HalfRight())
    hooks.emit("before_step", None, None)
    assert calls == []


def test_a_failure_while_reporting_an_error_is_noted_on_it_and_not_raised():
    class Failing:
        def on_error(self, trainer: Any, error: BaseException) -> None:
            raise ValueError("cannot send mail")

    error = ZeroDivisionError("first")
    Hooks([Failing()]).emit_error(None, error)
    (note,) = error.__notes__
    assert "cannot send mail" in note


def offer(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Makes hooks available as an installed package would."""
    made = [importlib.metadata.EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in points.items()]

    def entry_points(**selection: Any) -> importlib.metadata.EntryPoints:
        return importlib.metadata.EntryPoints(made).select(**selection)

    monkeypatch.setattr(hooks_module, "entry_points", entry_points)


class Installed:
    """A class that a package offers by name."""

    made: list[Installed] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.calls = 0
        self.made.append(self)

    def before_step(self, trainer: Any, batch: Any) -> None:
        self.calls += 1
        if batch == "bad":
            raise ZeroDivisionError


@pytest.fixture
def own_module(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "package_with_hooks", sys.modules[__name__])
    Installed.made.clear()


@pytest.mark.usefixtures("own_module")
def test_installed_hooks_are_made_by_name_and_switched_off_when_they_fail(monkeypatch):
    offer(monkeypatch, mine="package_with_hooks:Installed", other="package_with_hooks:Recorder")
    assert installed_hooks() == ["mine", "other"]
    hooks = Hooks(names=["mine"])
    (made,) = Installed.made
    hooks.emit("before_step", None, "good")
    with pytest.warns(UserWarning, match="The hook mine failed .* is switched off"):
        hooks.emit("before_step", None, "bad")
    hooks.emit("before_step", None, "good")
    assert made.calls == 2


@pytest.mark.usefixtures("own_module")
def test_a_package_may_offer_an_object_instead_of_a_class(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(hooks_module, "_an_object_for_this_test", made, raising=False)
    offer(monkeypatch, ready="hybridtrainer.hooks:_an_object_for_this_test")
    Hooks(names=["ready"]).emit("after_backward", 1)
    assert made.calls == [("after_backward", 1)]


def test_a_name_that_no_package_offers_is_refused_with_those_that_exist(monkeypatch):
    offer(monkeypatch, mine="json:JSONEncoder", yours="json:JSONDecoder")
    with pytest.raises(HookError, match=r"named theirs\. Installed hooks: mine, yours"):
        Hooks(names=["theirs"])
    offer(monkeypatch)
    with pytest.raises(HookError, match="Installed hooks: none"):
        Hooks(names=["theirs"])


@pytest.mark.parametrize("value", ["no_such_package:Hook", "json:NoSuchHook", "pathlib:Path.read_text.missing"])
def test_an_installed_hook_that_cannot_be_loaded_is_named(monkeypatch, value):
    offer(monkeypatch, broken=value)
    with pytest.raises(HookError, match="The hook broken could not be loaded"):
        Hooks(names=["broken"])


def test_an_installed_hook_without_methods_is_refused(monkeypatch):
    offer(monkeypatch, empty="json:JSONEncoder")
    with pytest.raises(HookError, match="The hook empty has none"):
        Hooks(names=["empty"])


def test_it_is_known_whether_anybody_hears():
    hooks = Hooks([Recorder()])
    assert hooks.hears("before_jump", "before_step") and not hooks.hears("before_jump")
    switched_off = Hooks()
    switched_off.add(Failing(), policy="disable")
    with pytest.warns(UserWarning, match="switched off"):
        switched_off.emit("before_step", "trainer", "batch")
    assert not switched_off.hears("before_step")
