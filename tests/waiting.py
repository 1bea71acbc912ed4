"""Waiting for a condition, with a deadline."""

import asyncio
import time
from collections.abc import Callable


def until(condition: Callable[[], bool], timeout_s: float, what: str, pause_s: float = 0.1) -> None:
    """Raises TimeoutError where the condition does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(pause_s)


async def reached(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """The same on an event loop. The default is for other processes that share the cores."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
