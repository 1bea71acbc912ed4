"""The lease of callers who carry none: vLLM's HTTP clients are all the one publisher "http".

    call ─► session (acquires or renews) ─► the call itself ─► session ─► no round is open? release
                                               └─ takes long? renew

Between calls the lease is held only while a round is open.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from deployments.errors import SlipstreamError
from deployments.logs import serve_logger
from deployments.lost_calls import answered, is_lost
from deployments.protocol.publishing import PublisherSession
from deployments.unary import UnaryHandle

PUBLISHER = "http"
RENEW_S = 5.0
CLEAN_UP_TIMEOUT_S = 10.0

logger = serve_logger()


class HttpLease:
    """Acquires, renews and releases the publisher's lease, call by call.

    Args:
        renew_s: how often it is renewed during a long call; well below the lease's duration.
    """

    def __init__(self, controller: UnaryHandle, renew_s: float = RENEW_S) -> None:
        self._controller = controller
        self._renew_s = renew_s

    @contextlib.asynccontextmanager
    async def session(self, *, of_round: bool = False) -> AsyncIterator[PublisherSession]:
        """The lease for one call; renewed by a call of the open round, and by one that succeeds.

        A call that is refused does not renew it: whoever knocks again and again while a round is open, as a
        trainer that was started anew does, would keep the round of the one that is gone.

        Args:
            of_round: the call belongs to the open round.

        Raises:
            Conflict: another publisher holds it.
        """
        session = await answered(lambda: self._controller.session.remote(PUBLISHER, of_round), "session")
        succeeded = False
        try:
            yield session
            succeeded = True
        finally:
            try:
                left = self._release_unless_open(renew=of_round or succeeded)
                await asyncio.wait_for(left, CLEAN_UP_TIMEOUT_S)
            except Exception as error:  # the call has an outcome, which must not be hidden
                if not (is_lost(error) or isinstance(error, SlipstreamError | TimeoutError)):
                    raise
                logger.info("the lease of %r is not released and expires: %s", PUBLISHER, error)

    async def _release_unless_open(self, *, renew: bool) -> None:
        # Asked again: the call may have opened or ended a round, or have taken longer than the lease.
        left: PublisherSession = await self._controller.session.remote(PUBLISHER, renew)
        if left.round_id is None:
            await self._controller.release.remote(left.token)

    async def renewing(self, token: int, call: Awaitable[Any]) -> None:
        """Wait for a call that may take longer than the lease; the client, which waits too, cannot renew it.

        Raises:
            StalePublisher: the lease was lost meanwhile.
            SlipstreamError: the call's own.
        """
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait({task}, timeout=self._renew_s))[0]:
            await self._controller.renew.remote(token)
        await task
