"""Graceful shutdown: no request is lost and no round waits for this replica.

    no new requests ─► running ones finish ─► the ledger releases it between rounds ─► last report
                       at most `drain_s`      at most `RELEASE_S`

It takes part in rounds until its last request has finished. If the application stops, it drains, and finishes
its write to the store, which no other replica will do.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from deployments.host.logs import serve_logger

RELEASE_S = 60.0  # longer than most rounds
LOST_CONTACT_S = 30.0  # the controller may be restarting
WRITE_S = 300.0  # waits for the version that it writes
APPLICATION_DRAIN_S = 10.0  # if the whole application stops
STATUS_S = 3.0
LAST_REPORT_S = 5.0
RECHECK_S = 0.05

logger = serve_logger()


class LeavingMember(Protocol):
    leaving: bool
    drained: bool
    may_leave: bool

    @property
    def is_writing(self) -> bool: ...


async def shut_down(
    member: LeavingMember,
    *,
    last_contact: Callable[[], float],
    in_flight: Callable[[], int],
    failed: Callable[[], bool],
    stop: Callable[[], None],
    send_last_report: Callable[[], Awaitable[None]],
    application_stops: Callable[[], Awaitable[bool]],
    drain_s: float,
    release_s: float = RELEASE_S,
    lost_contact_s: float = LOST_CONTACT_S,
) -> None:
    """Returns when the engine may be stopped.

    Args:
        last_contact: when the controller last answered, by `time.monotonic`.
        failed: fenced or dead, so nothing is worth waiting for.
        stop: refuses requests that have not started their response.
    """

    async def until(ready: Callable[[], bool], limit_s: float, *, alone: bool = False) -> bool:
        """Whether it became true in time; gives up if the replica failed or, unless `alone`, lost its
        controller."""
        begin = time.monotonic()
        while not ready():
            now = time.monotonic()
            lost = not alone and now - last_contact() > lost_contact_s
            if failed() or now - begin > limit_s or lost:
                return False
            await asyncio.sleep(RECHECK_S)
        return True

    member.leaving = True
    all_stops = False
    with contextlib.suppress(Exception):  # Serve's controller may be restarting, or gone
        all_stops = await asyncio.wait_for(application_stops(), STATUS_S)
    limit_s = min(drain_s, APPLICATION_DRAIN_S) if all_stops else drain_s
    if not await until(lambda: not in_flight(), limit_s) and not failed():
        logger.warning("aborting %d requests that are still running", in_flight())
    stop()
    member.drained = True
    if all_stops:
        await until(lambda: not member.is_writing, WRITE_S, alone=True)
    if failed() or all_stops:
        return
    if not await until(lambda: member.may_leave, release_s) and not failed():
        logger.warning("exiting before the ledger released this replica")
    with contextlib.suppress(Exception):
        await asyncio.wait_for(send_last_report(), LAST_REPORT_S)
