"""Processes that work on one device one at a time, by a lock that ends with its process."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["alone", "turn"]


@contextmanager
def alone(*, or_with_others: bool = False) -> Iterator[None]:
    """Until it ends, no other process of this machine is inside. or_with_others: but for those that said so too, such
    as compilations, which may go side by side and must not disturb what is timed."""
    with _lock("benchmark").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if or_with_others else fcntl.LOCK_EX)
        yield


@contextmanager
def turn(give_up: Callable[[], bool] = lambda: False, *, pause: float = 0.02) -> Iterator[bool]:
    """Whether this process has the devices that it sees (CUDA_VISIBLE_DEVICES) to itself, among all that take turns.

    Waits for it, until give_up() says True.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(os.sep, "_")
    with _lock(f"devices_{devices}").open("w") as file:
        while not give_up():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(pause)
            else:
                yield True
                return
        yield False


def _lock(name: str) -> Path:
    return Path(tempfile.gettempdir(), f"kimi_jax_{name}.lock")
