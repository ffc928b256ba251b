"""SIGINT and SIGTERM as a request to stop at the next step boundary; a second one stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While open, remembers the first signal instead of letting it end the process.

    Signals can only be caught in the main thread; elsewhere this does nothing. A signal that the process was told to
    ignore stays ignored: a job in the background shall not end by a Ctrl-C meant for another.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

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
        if self.signal is None:
            self.signal = number
            return
        self._put_back()
        signal.raise_signal(number)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
