"""Signals that wait for a step boundary: requests to stop, and the death of a process that loads data."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from hybridtrainer import ranks

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While open, remembers the first signal instead of letting it end the process.

    The second one finds the handlers that were there before: a SIGTERM that nobody handles ends the process wherever it
    is, and Ctrl-C is Python's own, which waits for the operation that is running.

    Signals can only be caught in the main thread; elsewhere this does nothing. A signal that the process was told to
    ignore stays ignored: a job in the background shall not end by a Ctrl-C meant for another.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.noted = False
        self._before: dict[int, Any] = {}

    def heard(self, note: bool = False) -> int | None:
        """The signal that has come, to this process or to another rank of the same run: all of them stop together.

        Args:
            note: Told to the other ranks on the same way; `noted` says afterwards whether one of them did.
        """
        found = ranks.exchange("signal", (self.signal, note))
        self.signal = next((signal for signal, _ in found if signal is not None), None)
        self.noted = any(noted for _, noted in found)
        return self.signal

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._remember) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class ChildDeaths:
    """While open, the death of a child process is heard of where `heard` is open and nowhere else.

    torch answers the death of a loader's worker by raising from its handler of SIGCHLD wherever the program is: in the
    middle of an update, or of the checkpoint that another sign of the same death has led to. What comes while it is not
    heard waits for the next `heard`; at the end it is a note on the error that is on its way, if there is one.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None  # whom to tell later, while holding back
        self._came = False

    def __enter__(self) -> Self:
        self._hold_back()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._let_go()
        except Exception as late:
            if error is not None and str(late) != str(error):
                error.add_note(f"Meanwhile: {late}")

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Lets through what has come, then what comes at once."""
        try:
            self._let_go()
            yield
        finally:
            self._hold_back()

    def _hold_back(self) -> None:
        handler = signal.getsignal(signal.SIGCHLD)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler, self._came = handler, False
            signal.signal(signal.SIGCHLD, self._remember)

    def _let_go(self) -> None:
        handler, self._handler = self._handler, None
        if handler is None:
            return
        if signal.getsignal(signal.SIGCHLD) == self._remember:  # torch may have put its own before ours meanwhile
            signal.signal(signal.SIGCHLD, handler)
        if self._came:
            handler(signal.SIGCHLD, None)

    def _remember(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True
