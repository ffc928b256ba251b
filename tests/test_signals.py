"""Signals wait for a step boundary, the second request is obeyed, and the handlers before are put back."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from hybridtrainer.signals import HANDLED, ChildDeaths, StopRequest


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*HANDLED, signal.SIGCHLD)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in HANDLED]


@pytest.mark.parametrize("number", HANDLED)
def test_the_first_signal_is_remembered_and_nothing_else_happens(number):
    with StopRequest() as stop:
        assert stop.signal is None
        signal.raise_signal(number)
        assert stop.signal == number
    assert stop.signal == number


def test_a_second_interrupt_stops_at_once():
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second signal was swallowed")
    assert stop.signal == signal.SIGINT


def test_after_the_first_signal_the_second_waits_for_nobody():
    before = handlers()
    with StopRequest():
        signal.raise_signal(signal.SIGTERM)
        assert handlers() == before  # of which SIGTERM's is the system's, that needs no Python to run


def test_a_second_sigterm_ends_a_process_that_is_in_the_middle_of_an_operation():
    script = """
import signal
from hybridtrainer.signals import StopRequest
with StopRequest() as stop:
    signal.raise_signal(signal.SIGTERM)
    print(stop.signal, flush=True)
    sum(range(10**11))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline().strip() == "15"
        process.terminate()
        try:
            assert process.wait(timeout=20) == -signal.SIGTERM
        finally:
            process.kill()


def test_a_signal_that_is_ignored_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.signal is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_second_signal_goes_to_the_handler_before_whichever_it_is():
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert received == []
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    assert stop.signal == signal.SIGINT


def test_handlers_are_put_back_at_the_end_and_after_an_error():
    before = handlers()
    with StopRequest():
        assert handlers() != before
    assert handlers() == before
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert handlers() == before


def test_an_ignored_signal_is_ignored_again_afterwards():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_requests_nest():
    with StopRequest() as outer:
        with StopRequest() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert inner.signal == signal.SIGTERM
        assert outer.signal is None
        signal.raise_signal(signal.SIGINT)
        assert outer.signal == signal.SIGINT


def test_another_thread_can_use_it_and_catches_nothing():
    before, seen = handlers(), []

    def work() -> None:
        with StopRequest() as stop:
            seen.append((handlers(), stop.signal))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, None)]
    assert handlers() == before


def torn(number: int, frame: object) -> None:
    raise RuntimeError("a worker died")


def test_a_death_waits_until_it_is_heard():
    signal.signal(signal.SIGCHLD, torn)
    reached = []
    with ChildDeaths() as deaths:
        signal.raise_signal(signal.SIGCHLD)
        reached.append("after the death")
        with pytest.raises(RuntimeError, match="a worker died"), deaths.heard():
            reached.append("heard too late")
        with deaths.heard():  # once
            pass
        with pytest.raises(RuntimeError, match="a worker died"), deaths.heard():
            signal.raise_signal(signal.SIGCHLD)
            reached.append("not heard")
        signal.raise_signal(signal.SIGCHLD)  # held back again; at the end nobody needs to know
    assert reached == ["after the death"]
    assert signal.getsignal(signal.SIGCHLD) is torn


def test_a_death_does_not_take_the_place_of_an_error():
    signal.signal(signal.SIGCHLD, torn)
    with pytest.raises(ConnectionResetError) as caught, ChildDeaths():
        signal.raise_signal(signal.SIGCHLD)
        raise ConnectionResetError
    assert caught.value.__notes__ == ["Meanwhile: a worker died"]


def test_a_handler_that_came_meanwhile_stays():
    signal.signal(signal.SIGCHLD, torn)
    other = lambda number, frame: None  # noqa: E731
    with ChildDeaths():
        signal.signal(signal.SIGCHLD, other)
    assert signal.getsignal(signal.SIGCHLD) is other


def test_without_a_handler_nothing_is_put_in():
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with ChildDeaths():
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL


def test_a_request_alone_hears_itself_and_what_it_noted():
    with StopRequest() as stop:
        assert stop.heard() is None and not stop.noted
        signal.raise_signal(signal.SIGTERM)
        assert stop.heard(note=True) == signal.SIGTERM and stop.noted
