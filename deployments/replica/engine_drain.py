"""One engine's drain: it begins no request, and lets those that run come to their end.

    begin ─► the engine core begins nothing ─► asked every `DRAIN_POLL_S` how many requests run ─► end

Nobody waits here: the replica's reports say what still runs, and the controller decides when it is enough.
"""

import asyncio
from collections.abc import Awaitable, Callable

from deployments.logs import serve_logger
from deployments.protocol.reports import Draining
from deployments.replica.engine_core import DRAIN, RUNNING

DRAIN_POLL_S = 0.05
ANSWER_S = 10.0  # of the engine core, which answers between two steps

logger = serve_logger()


class EngineDrain:
    """The drains that the controller has asked for.

    Args:
        ask: calls a utility of every engine core; one answer for each.
    """

    def __init__(self, ask: Callable[[str], Awaitable[list[int]]]) -> None:
        self._ask = ask
        self._ids: dict[str, None] = {}  # in order
        self._running: int | None = None
        self._watching: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._ids)

    @property
    def state(self) -> Draining | None:
        """For the replica's reports; None: it does not drain."""
        return Draining(drain_ids=tuple(self._ids), running=self._running) if self._ids else None

    async def begin(self, drain_id: str, *, may_run: bool) -> None:
        """Drain for one more. An engine that does not answer is not waited for.

        Args:
            may_run: whether its scheduler may run at all. If not, `resumed` begins the drain.
        """
        self._ids[drain_id], self._running = None, None
        await self._count(DRAIN if may_run else RUNNING)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def resumed(self) -> None:
        """The scheduler runs again: only what is drained."""
        await self._ask(DRAIN)

    def end(self, drain_id: str) -> bool:
        """Forget a drain; whether it was the last one."""
        was = drain_id in self._ids
        self._ids.pop(drain_id, None)
        return was and not self._ids

    async def _watch(self) -> None:
        while self._ids:
            await asyncio.sleep(DRAIN_POLL_S)
            await self._count(RUNNING)

    async def _count(self, utility: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):  # not wait_for, which can swallow a cancellation
                self._running = sum(await self._ask(utility))
        except TimeoutError:
            self._running = None
        except Exception as error:  # a dead engine: the replica's health check finds it
            logger.debug("the engine does not say how many requests run: %s", error)
            self._running = None
