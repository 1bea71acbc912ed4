"""Calls of a deployment of one replica (controller, trainer) by those that outlive it.

    call ──► the process dies ──► Serve starts a successor ──► the call again, if it may be repeated

A call that was lost has been carried out or not. Only a call whose repetition changes nothing may be
repeated: a question, or `close_round`, which the controller answers from its record.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import RayServeException, RequestCancelledError

from deployments.errors import FleetUnavailable
from deployments.logs import serve_logger

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


def repeated(
    call: Callable[[], Result],
    what: str,
    *,
    wait_s: float = RESTART_WAIT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """The answer to a call that may be repeated, of a successor if need be. It blocks.

    Args:
        what: the call, for a person.
        wait_s: from the first loss on.

    Raises:
        FleetUnavailable: nobody answered in time.
        Exception: what the call raises.
    """
    deadline: float | None = None
    while True:
        try:
            return call()
        except Exception as error:
            if not is_lost(error):
                raise
            deadline = _deadline(deadline, clock() + wait_s, what)
            if clock() >= deadline:
                raise _nobody(what, wait_s) from error
        sleep(REPEAT_S)


async def answered(
    call: Callable[[], Awaitable[Result]], what: str, *, wait_s: float = RESTART_WAIT_S
) -> Result:
    """As `repeated`, in an event loop. A single attempt has no longer than `wait_s` for its answer.

    Raises:
        FleetUnavailable: nobody answered in time.
        Exception: what the call raises.
    """
    deadline: float | None = None
    while True:
        try:
            async with asyncio.timeout(wait_s):  # not wait_for, which can swallow a cancellation
                return await call()
        except TimeoutError as error:
            raise _nobody(what, wait_s) from error
        except Exception as error:
            if not is_lost(error):
                raise
            deadline = _deadline(deadline, time.monotonic() + wait_s, what)
            if time.monotonic() >= deadline:
                raise _nobody(what, wait_s) from error
        await asyncio.sleep(REPEAT_S)


def _deadline(before: float | None, after_first_loss: float, what: str) -> float:
    if before is not None:
        return before
    logger.warning("%s: who was to answer is gone; its successor is asked", what)
    return after_first_loss


def _nobody(what: str, wait_s: float) -> FleetUnavailable:
    return FleetUnavailable(f"{what}: nobody answered within {wait_s:g} s; try again")
