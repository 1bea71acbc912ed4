"""Coroutine tests on a loop whose time jumps to the next timer when nothing is ready."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from tests.simulation.loop import Loop

LIMIT_S = 100_000.0


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test function on such a loop."""

    @wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        loop = Loop(executor=lambda *_: None, after_step=lambda: None)
        running = loop.create_task(test(*args, **fixtures))
        assert loop.run_until(running.done, LIMIT_S), "the test hangs"
        running.result()
        loop.close()

    return run
