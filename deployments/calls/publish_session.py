"""A publisher's lease and its round, from the first call to the report.

acquire ──► connect ──► open ──► send, send, ... ──► close ──► report ──► release

a slow call                              the lease is renewed until it returns
any exception before the report          the round is aborted at once, not when its lease expires
the controller dies before the close     TransferAborted, {"send_again": true}: the round died with it
the controller dies during the close     the successor answers: it knows a decided round by its number
nothing answers the close                AnswerLost; `outcome` finds the round in the record
another publisher took the lease         StalePublisher
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import JsonValue

from deployments.calls.rpc import CallHandle, bounded, is_lost, retried
from deployments.host.logs import serve_logger
from deployments.protocol import errors
from deployments.protocol.poll import FilePart
from deployments.protocol.publishing import JoinedLease, Lease, RoundOptions, RoundReport
from deployments.protocol.responses import FleetStatus

CALL_TIMEOUT_S = 600.0  # the controller hangs: its own deadlines are shorter
CLEAN_UP_TIMEOUT_S = 10.0  # the lease's expiry cleans up the rest
ASK_AGAIN_S = 0.1

Result = TypeVar("Result")
logger = serve_logger()


def outcome(
    round_id: int, fleet_id: str, fleet: FleetStatus, ended: Sequence[RoundReport]
) -> RoundReport | None:
    """Learn the outcome of a round whose close was not answered. None: it is still running. Raises
    RoundAborted, or Conflict: the fleet has no record."""
    if fleet.fleet_id == fleet_id:  # another fleet has numbers of its own
        for report in ended:
            if report.round_id == round_id and report.phase == "committed":
                return report
            if report.round_id == round_id:
                raise errors.RoundAborted(
                    f"round {round_id} was aborted: {report.reason}", {"round_id": round_id}
                )
        if fleet.round is not None and fleet.round.round_id == round_id:
            return None
    raise errors.Conflict(
        f"whether round {round_id} of fleet {fleet_id} was committed is not known: fleet {fleet.fleet_id}, "
        f"which has no record of it, is at version {fleet.committed_version}",
        {"round_id": round_id, "version": fleet.committed_version},
    )


class PublishSession:
    """One publisher's calls, in one event loop.

    The first call that needs the lease acquires it. Leaving the context manager releases it, and aborts the
    round if the block raises.

    Every method raises the controller's errors, `TransferAborted` with {"send_again": true} if the controller
    dies before the round is closed, and `FleetUnavailable` if neither it nor a successor answers in time.
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
        if self._lease is not None:
            return self._lease
        lease: Lease = await retried(self._controller, "acquire", self._publisher)
        self._lease = lease
        return lease

    async def connect(self, init_info: Mapping[str, JsonValue]) -> None:
        await self._call("connect", init_info)

    async def disconnect(self) -> None:
        await self._call("disconnect")

    async def open(self, options: RoundOptions) -> None:
        self.round_id = await self._call("open_round", options)

    async def send(self, payload: JsonValue | FilePart) -> None:
        """Returns once every participant has received the payload."""
        await self._call("send", self.round_id, payload)

    async def close(self, label: str | None = None) -> RoundReport:
        """Raises AnswerLost: it may be committed, now or later; `outcome` tells."""
        assert self._lease is not None and self.round_id is not None, "open a round first"
        token, round_id = self._lease.token, self.round_id
        try:
            report: RoundReport = await retried(
                self._controller, "close_round", token, round_id, label, limit_s=CALL_TIMEOUT_S
            )
        except errors.FleetUnavailable as error:
            raise errors.AnswerLost(
                f"round {round_id} may be committed, see /fleet/rounds: {error.message}",
                {"round_id": round_id},
            ) from error
        self.round_id = None
        return report

    async def abort(self, reason: str) -> None:
        round_id, self.round_id = self.round_id, None
        if round_id is not None and self._lease is not None:
            aborting = self._controller.abort_round.remote(self._lease.token, round_id, reason)
            await self._clean_up(aborting, f"abort of round {round_id}")
        await self.release()

    async def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await self._clean_up(self._controller.release.remote(lease.token), "release of the lease")

    async def renewing(self, work: Awaitable[Result]) -> Result:
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
        try:
            await bounded(self._controller.renew.remote(lease.token), "renew", lease.duration_s / 3)
        except errors.StalePublisher:
            raise
        except Exception as error:  # the call that it is for reports the loss
            if not (is_lost(error) or isinstance(error, errors.SlipstreamError)):
                raise
            logger.warning("the lease of %r is not renewed: %s", self._publisher, error)

    async def _call(self, method: str, *args: Any) -> Any:
        """Not repeated: losing the call loses the round."""
        lease = await self.acquire()
        call = getattr(self._controller, method).remote(lease.token, *args)
        try:
            return await bounded(self.renewing(call), method, CALL_TIMEOUT_S)
        except Exception as error:
            lost = is_lost(error)
            if lost or isinstance(error, errors.StalePublisher):
                self._lease = self.round_id = None
            if not lost:
                raise
            raise errors.TransferAborted(
                f"the controller was lost during {method!r}, and the round with it; connect and send again",
                {"send_again": True},
            ) from error

    async def _clean_up(self, call: Awaitable[object], what: str) -> None:
        try:
            await bounded(call, what, CLEAN_UP_TIMEOUT_S)
        except Exception as error:
            if not (is_lost(error) or isinstance(error, errors.SlipstreamError)):
                raise
            logger.info("%s by %r failed; the lease expires: %s", what, self._publisher, error)


async def joined(controller: CallHandle, publisher: str, *, of_round: bool = False) -> PublishSession:
    """For one call of a publisher without a token.

    The call renews the lease first if it belongs to the open round (`of_round`): a restarted trainer that
    retries would keep its predecessor's round alive. Raises Conflict: another publisher holds the lease.
    """
    found: JoinedLease = await retried(controller, "join_lease", publisher, of_round)
    return PublishSession(controller, publisher, found)
