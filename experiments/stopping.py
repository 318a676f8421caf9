"""Stopping at the end of a step instead of in the middle of it."""

import math
import signal
import threading
import time
from types import FrameType


class StopRequest:
    """While entered, SIGTERM (a scheduler's) and the first Ctrl-C only set `requested`; a second Ctrl-C interrupts.

    limit_minutes after it was made, `requested` becomes true by itself. Signal handlers belong to the main thread; in
    another thread (a notebook's executor) only the time counts.
    """

    def __init__(self, limit_minutes: float = math.inf) -> None:
        self._signalled = False
        self._deadline = time.monotonic() + 60 * limit_minutes
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self._signalled or time.monotonic() >= self._deadline

    def minutes_left(self) -> float:
        """Until the limit; 0 if stopping was requested already."""
        return 0.0 if self.requested else (self._deadline - time.monotonic()) / 60

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
        if self._signalled and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signalled = True
