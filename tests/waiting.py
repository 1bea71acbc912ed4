"""Waiting for a condition, with a deadline."""

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], timeout_s: float, what: str, pause_s: float = 0.1) -> None:
    """Raises TimeoutError where the condition does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(pause_s)
