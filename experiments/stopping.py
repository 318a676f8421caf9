"""Stopping at the end of a step instead of in the middle of it."""

import signal
import threading
from types import FrameType


class StopRequest:
    """While entered, SIGTERM (a scheduler's) and the first Ctrl-C only set `requested`; a second Ctrl-C interrupts.

    Signal handlers belong to the main thread; in another thread (a notebook's executor) this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
