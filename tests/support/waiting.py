"""Wait for something to become true by asking again and again, never by guessing how long it takes."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout_s: float, what: str, *, interval_s: float = 0.05) -> T:
    """Ask `predicate` every `interval_s` seconds and return its first true answer.

    Raises `TimeoutError`, naming `what` was waited for, once `timeout_s` seconds have passed without one.
    """
    deadline = time.monotonic() + timeout_s
    while not (answer := predicate()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(interval_s)
    return answer
