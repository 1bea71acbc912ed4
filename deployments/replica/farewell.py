"""How a replica that is no longer wanted ends: nobody's request is lost, and no round waits for it.

    no new request ─► those that run end ─► let go by the ledger, between two rounds ─► goodbye
                      at most `drain_s`     at most `LEAVE_S`

Until its last request has ended it takes part in rounds like the others. When the whole fleet ends, nobody is
left to wait for.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from deployments.host.logs import serve_logger

LEAVE_S = 60.0  # longer than most rounds
ABANDONED_S = 30.0  # without contact to the controller, which may be restarting
ENDING_DRAIN_S = 10.0  # of requests when the whole fleet ends
ASK_S = 3.0
GOODBYE_S = 5.0
RECHECK_S = 0.05

logger = serve_logger()


class Leaver(Protocol):
    """What a replica says while it leaves, and hears."""

    leaving: bool
    drained: bool
    may_leave: bool


class Farewell:
    """One replica's end.

    Args:
        member: what the replica reports.
        last_contact: when the controller answered last, by `time.monotonic`.
        in_flight: requests that are running.
        failed: whether the replica is fenced, or its engine dead: then nothing is waited for.
        stop: refuse what has not begun to be answered, for another replica.
        goodbye: tell the controller.
        fleet_ends: whether all of it is being stopped.
        drain_s: how long requests that are running may go on.
    """

    def __init__(
        self,
        member: Leaver,
        *,
        last_contact: Callable[[], float],
        in_flight: Callable[[], int],
        failed: Callable[[], bool],
        stop: Callable[[], None],
        goodbye: Callable[[], Awaitable[None]],
        fleet_ends: Callable[[], Awaitable[bool]],
        drain_s: float,
        leave_s: float = LEAVE_S,
        abandoned_s: float = ABANDONED_S,
    ) -> None:
        self._member = member
        self._last_contact = last_contact
        self._in_flight = in_flight
        self._failed = failed
        self._stop = stop
        self._goodbye = goodbye
        self._fleet_ends = fleet_ends
        self._drain_s = drain_s
        self._leave_s = leave_s
        self._abandoned_s = abandoned_s

    async def run(self) -> None:
        """Return when the engine may be ended."""
        self._member.leaving = True
        ends = await self._ends()
        drain_s = min(self._drain_s, ENDING_DRAIN_S) if ends else self._drain_s
        if not await self._until(lambda: not self._in_flight(), drain_s) and not self._failed():
            logger.warning("%d requests are still running: their answers are cut off", self._in_flight())
        self._stop()
        self._member.drained = True
        if self._failed() or ends:
            return
        if not await self._until(lambda: self._member.may_leave, self._leave_s) and not self._failed():
            logger.warning("this replica ends before the fleet has let it go")
        with contextlib.suppress(Exception):  # there may be no controller any more
            await asyncio.wait_for(self._goodbye(), GOODBYE_S)

    async def _ends(self) -> bool:
        with contextlib.suppress(Exception):  # Serve's controller may be restarting, or gone
            return await asyncio.wait_for(self._fleet_ends(), ASK_S)
        return False

    async def _until(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Whether it became true; not waited for by a replica that has failed, or is left alone."""
        begin = time.monotonic()
        while not ready():
            now = time.monotonic()
            if self._failed() or now - begin > limit_s or now - self._last_contact() > self._abandoned_s:
                return False
            await asyncio.sleep(RECHECK_S)
        return True
