"""Calls of a deployment of one replica (controller, trainer) by those that outlive it.

    call ──► the process dies ──► Serve starts a successor ──► the call again, if it may be repeated

A call that was lost has been carried out or not. Only a call whose repetition changes nothing may be
repeated: a question, or `close_round`, which the controller answers from its record.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException, RequestCancelledError

from deployments.host.logs import serve_logger
from deployments.protocol.errors import FleetUnavailable

RESTART_WAIT_S = 120.0  # for a successor; on a busy host its process takes many seconds to start
REPEAT_S = 0.2

Result = TypeVar("Result")
logger = serve_logger()


def is_lost(error: BaseException) -> bool:
    """Whether the process that was to answer is gone, or says that it is about to be replaced.

    False for all else that it raises itself.
    """
    if isinstance(error, FleetUnavailable):
        return error.detail.get("restarting") is True
    if isinstance(error, RayTaskError | RequestCancelledError):
        return False
    return isinstance(error, RayActorError | RayServeException)


async def once(call: Awaitable[Result], what: str, limit_s: float) -> Result:
    """The answer to a call.

    Args:
        what: the call, for a person.

    Raises:
        FleetUnavailable: nobody answered in time.
        Exception: what the call raises.
    """
    try:
        async with asyncio.timeout(limit_s):  # not wait_for, which can swallow a cancellation
            return await call
    except TimeoutError as error:
        raise _no_answer(what, limit_s) from error


async def answered(
    call: Callable[[], Awaitable[Result]], what: str, *, limit_s: float = RESTART_WAIT_S
) -> Result:
    """The answer to a call that may be repeated, of a successor if need be.

    Args:
        what: the call, for a person.
        limit_s: for each attempt. A successor has `RESTART_WAIT_S` from the first loss on.

    Raises:
        FleetUnavailable: nobody answered in time.
        Exception: what the call raises.
    """
    loop, deadline = asyncio.get_running_loop(), None
    while True:
        try:
            return await once(call(), what, limit_s)
        except Exception as error:
            if not is_lost(error):
                raise
            if deadline is None:
                logger.warning("%s: who was to answer is gone; its successor is asked", what)
                deadline = loop.time() + RESTART_WAIT_S
            if loop.time() >= deadline:
                raise _no_answer(what, RESTART_WAIT_S) from error
        await asyncio.sleep(REPEAT_S)


def _no_answer(what: str, limit_s: float) -> FleetUnavailable:
    return FleetUnavailable(f"{what}: nobody answered within {limit_s:g} s; try again")
