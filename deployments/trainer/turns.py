"""The trainer's calls take turns, and a call that has begun goes on to its end.

Workers cannot be stopped in the middle of a step or a round. If the caller goes away meanwhile (its
connection broke), the call goes on, so that the next one finds the workers free, and the status says what was
done: a client that asks it does not repeat a step.

Work runs in a context of its own. Ray knows by a context variable which actor call a task belongs to, and
Serve cancels a request whose caller is gone together with every actor call that was made for it: without
this, those to the workers too, in mid-step.
"""

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from deployments.logs import serve_logger

Result = TypeVar("Result")
logger = serve_logger()


class Turns:
    """First come, first served. A caller that goes away before its turn has no turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue = asyncio.Lock()  # asyncio's lock is fair
        self._since = 0.0
        self.doing: str | None = None

    @property
    def doing_s(self) -> float:
        """For how long; 0 where nothing is done."""
        return round(self._clock() - self._since, 3) if self.doing is not None else 0.0

    async def take(self, name: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """Wait for the turn, then do the work.

        Raises:
            Exception: what the work raises.
        """
        await self._queue.acquire()
        task = asyncio.create_task(self._run(name, work), context=contextvars.Context())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                logger.warning("the caller of %r is gone: the trainer goes on with it", name)
                task.add_done_callback(_look_at)
            raise

    async def _run(self, name: str, work: Callable[[], Awaitable[Result]]) -> Result:
        self.doing, self._since = name, self._clock()
        try:
            return await work()
        finally:
            self.doing = None
            self._queue.release()


def _look_at(task: "asyncio.Task[Any]") -> None:
    """Nobody else asks how it ended."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.warning("a call whose caller is gone has failed: %s", error)
