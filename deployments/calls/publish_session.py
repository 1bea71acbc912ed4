"""A publisher's lease and its round, from the first call to the report.

acquire ──► connect ──► open ──► send, send, ... ──► close ──► report ──► release

a call takes long                        the lease is renewed until it is answered
any exception before the report          the round is aborted at once, not when its lease expires
the controller dies before the close     TransferAborted, {"send_again": true}: the round died with it
the controller dies during the close     its successor is asked: it knows a decided round by its number
another publisher has taken the lease    StalePublisher
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import JsonValue

from deployments.calls.lost_calls import answered, is_lost, once
from deployments.calls.rpc import CallHandle
from deployments.host.logs import serve_logger
from deployments.protocol.errors import SlipstreamError, StalePublisher, TransferAborted
from deployments.protocol.poll import FilePart
from deployments.protocol.publishing import JoinedLease, Lease, RoundOptions, RoundReport

CALL_TIMEOUT_S = 600.0  # the controller has shorter deadlines of its own; this is for one that hangs
CLEAN_UP_TIMEOUT_S = 10.0  # what is not cleaned up ends with the lease

Result = TypeVar("Result")
logger = serve_logger()


class PublishSession:
    """The calls of one publisher of the fleet.

    The lease is acquired by the first call that needs it. As a context manager the session releases it at
    the end, and aborts the round if the block raises. Methods may run concurrently, in one event loop.

    Every method raises what the controller raises (`StalePublisher`, `RoundAborted`, `Conflict`,
    `InvalidRequest`, `FleetUnavailable`), `TransferAborted` with {"send_again": true} if the controller dies
    before the round is closed, and `FleetUnavailable` if it does not answer or has no successor in time.

    Args:
        publisher: the name under which the lease is held.

    Attributes:
        round_id: of the open round.
        remaining_s: of the lease when it was joined.
    """

    def __init__(self, controller: CallHandle, publisher: str, joined: JoinedLease | None = None) -> None:
        self._controller = controller
        self._publisher = publisher
        self._lease = None if joined is None else joined.lease
        self.round_id = None if joined is None else joined.round_id
        self.remaining_s = 0.0 if joined is None else joined.remaining_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await (self.release() if error is None else self.abort(str(error) or type(error).__name__))

    async def acquire(self) -> Lease:
        """The lease; a new one only if the session has none."""
        if self._lease is not None:
            return self._lease
        lease: Lease = await answered(lambda: self._controller.acquire.remote(self._publisher), "acquire")
        self._lease = lease
        return lease

    async def connect(self, init_info: Mapping[str, JsonValue]) -> None:
        """Connect every replica to the publisher's transfer group."""
        await self._call("connect", init_info)

    async def disconnect(self) -> None:
        """Every replica closes its end of the connection."""
        await self._call("disconnect")

    async def open(self, options: RoundOptions) -> None:
        """Open a round."""
        self.round_id = await self._call("open_round", options)

    async def send(self, payload: JsonValue | FilePart) -> None:
        """Send one payload of the open round; returns once every participant has received it."""
        await self._call("send", self.round_id, payload)

    async def send_adapter(self, load_id: str, payload: JsonValue) -> None:
        """Send an adapter's files for a load, outside of any round."""
        await self._call("send_adapter", load_id, payload)

    async def close(self, label: str | None = None) -> RoundReport:
        """Commit the open round. A closed round needs no lease, and a repeated close has the same answer."""
        assert self._lease is not None and self.round_id is not None, "open a round first"
        token, round_id = self._lease.token, self.round_id
        report: RoundReport = await answered(
            lambda: self._controller.close_round.remote(token, round_id, label),
            f"close_round of round {round_id}",
            limit_s=CALL_TIMEOUT_S,
        )
        self.round_id = None
        return report

    async def abort(self, reason: str) -> None:
        """Abort the open round, if there is one, and release the lease."""
        round_id, self.round_id = self.round_id, None
        if round_id is not None and self._lease is not None:
            aborting = self._controller.abort_round.remote(self._lease.token, round_id, reason)
            await self._clean_up(aborting, f"abort of round {round_id}")
        await self.release()

    async def release(self) -> None:
        """Release the lease, if there is one, so that others can publish."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await self._clean_up(self._controller.release.remote(lease.token), "release of the lease")

    async def leave(self, *, renew: bool) -> None:
        """Release the lease unless a round is open. Asks the controller, because another call of the same
        publisher may have opened or ended a round."""

        async def leaving() -> None:
            left: JoinedLease = await self._controller.join_lease.remote(self._publisher, renew)
            if left.round_id is None:
                await self._controller.release.remote(left.lease.token)

        await self._clean_up(leaving(), "release of the lease")

    async def renewing(self, work: Awaitable[Result]) -> Result:
        """Wait for what may outlast the lease, and renew that meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while (lease := self._lease) is not None:
                if (await asyncio.wait({task}, timeout=lease.duration_s / 3))[0]:
                    break
                await self._renew(lease)
            return await task
        finally:
            task.cancel()

    async def _renew(self, lease: Lease) -> None:
        """A renewal without an answer is not the end: the call that it is for has one."""
        try:
            await once(self._controller.renew.remote(lease.token), "renew", lease.duration_s / 3)
        except StalePublisher:
            raise
        except Exception as error:
            if not (is_lost(error) or isinstance(error, SlipstreamError)):
                raise
            logger.warning("the lease of %r is not renewed: %s", self._publisher, error)

    async def _call(self, method: str, *args: Any) -> Any:
        """A call that must not be repeated: if it is lost, so is the round."""
        lease = await self.acquire()
        call = getattr(self._controller, method).remote(lease.token, *args)
        try:
            return await once(self.renewing(call), method, CALL_TIMEOUT_S)
        except Exception as error:
            lost = is_lost(error)
            if lost or isinstance(error, StalePublisher):
                self._lease = self.round_id = None  # the controller knows neither
            if not lost:
                raise
            raise TransferAborted(
                f"the controller was lost during {method!r}, and the round with it; connect and send again",
                {"send_again": True},
            ) from error

    async def _clean_up(self, call: Awaitable[object], what: str) -> None:
        """The round has an outcome already, which a failure here must not hide."""
        try:
            await once(call, what, CLEAN_UP_TIMEOUT_S)
        except Exception as error:
            if not (is_lost(error) or isinstance(error, SlipstreamError)):
                raise
            logger.info("%s by %r failed; the lease expires: %s", what, self._publisher, error)


@contextlib.asynccontextmanager
async def joined(
    controller: CallHandle, publisher: str, *, of_round: bool = False
) -> AsyncIterator[PublishSession]:
    """The session of a publisher whose calls carry no token, for one of its calls.

    Between calls the lease is held only while a round is open. A call that fails does not renew it, unless it
    belongs to the round: a trainer that was restarted and tries again and again would keep the round of its
    predecessor alive.

    Args:
        of_round: the call belongs to the open round.

    Raises:
        Conflict: another publisher holds the lease.
    """
    found: JoinedLease = await answered(
        lambda: controller.join_lease.remote(publisher, of_round), "join_lease"
    )
    session, renew = PublishSession(controller, publisher, found), of_round
    try:
        yield session
        renew = True
    finally:
        await session.leave(renew=renew)
