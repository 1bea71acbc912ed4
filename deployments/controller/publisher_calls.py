"""The controller's calls of publishers: the lease, the connection and the rounds. The ledger decides."""

from collections.abc import Mapping

from pydantic import JsonValue

from deployments.controller.durable_ledger import DurableLedger
from deployments.errors import InvalidRequest
from deployments.ledger.ledger import Ledger
from deployments.protocol.files import FilePart
from deployments.protocol.json_values import json_only
from deployments.protocol.publishing import JoinedLease, Lease, RoundOptions, RoundReport


class PublisherCalls:
    """Base of the controller: Serve knows only methods of one class. The controller sets what it declares."""

    _ledger: Ledger
    _durable: DurableLedger

    async def acquire(self, publisher: str) -> Lease:
        """The lease, to publish.

        Raises:
            Conflict: another publisher holds it.
            FleetUnavailable: an update could not be recorded.
        """
        async with self._durable.answer(records=True):
            return self._ledger.acquire(publisher, self._durable.now())

    async def join_lease(self, publisher: str, renew: bool) -> JoinedLease:
        """The lease and the open round of a publisher whose calls carry no token; acquires if needed.

        Args:
            renew: whether the call belongs to the open round; others do not keep a lost publisher's round.

        Raises:
            Conflict: another publisher holds the lease.
        """
        async with self._durable.answer():
            return self._ledger.join_lease(publisher, self._durable.now(), renew=renew)

    async def renew(self, token: int) -> Lease:
        """To be called well within the lease's duration, also while waiting for another call.

        Raises:
            StalePublisher: the token is not the current one, as in all calls of a publisher below.
        """
        async with self._durable.answer():
            return self._ledger.renew(token, self._durable.now())

    async def release(self, token: int) -> None:
        """Give the lease back; an undecided round is aborted."""
        async with self._durable.answer():
            self._ledger.release(token, self._durable.now())

    async def connect(self, token: int, init_info: Mapping[str, JsonValue]) -> int:
        """Returns a connection id once every replica is connected.

        Raises:
            InvalidRequest: `init_info` is not JSON, does not fit the members, or no replica could connect.
            Conflict: a replica is gone; connect again.
        """
        async with self._durable.answer():
            checked = json_only(init_info, "init_info")
            if not isinstance(checked, dict):
                raise InvalidRequest(f"init_info: expected an object, got {type(init_info).__name__}")
            await self._durable.wait(self._ledger.is_complete, None)  # ranks are counted over all who serve
            return int(await self._durable.result(self._ledger.connect(token, checked, self._durable.now())))

    async def disconnect(self, token: int) -> dict[str, JsonValue]:
        """Every serving replica closes its end of the connection."""
        async with self._durable.answer():
            return dict(await self._durable.result(self._ledger.disconnect(token, self._durable.now())))

    async def open_round(self, token: int, options: RoundOptions | None = None) -> int:
        """Returns the round's id.

        Raises:
            Conflict: another round is open, the weights sleep, or the publisher must connect again.
            FleetUnavailable: too few replicas, or the round could not be recorded.
        """
        async with self._durable.answer(records=True):
            await self._durable.wait(self._ledger.is_complete, None)
            return self._ledger.open_round(token, options or RoundOptions(), self._durable.now())

    async def send(self, token: int, round_id: int, payload: JsonValue | FilePart) -> None:
        """Returns once every participant has received. A collective's data must flow meanwhile.

        Raises:
            InvalidRequest: the payload is not JSON, or every replica rejected it.
            RoundAborted: the round ended.
        """
        async with self._durable.answer():
            checked = payload if isinstance(payload, FilePart) else json_only(payload, "payload")
            await self._durable.result(self._ledger.send(token, round_id, checked, self._durable.now()))

    async def close_round(self, token: int, round_id: int, label: str | None = None) -> RoundReport:
        """Verify and commit; returns when every participant has swapped. See `Ledger.close_round`.

        Raises:
            InvalidRequest: every replica rejected what was sent.
            RoundAborted: the round was aborted for another reason.
        """
        async with self._durable.answer():
            call = self._ledger.close_round(token, round_id, label, self._durable.now())
            report: RoundReport = await self._durable.result(call)
            return report

    async def abort_round(self, token: int, round_id: int, reason: str) -> None:
        """The fleet goes on serving the old version."""
        async with self._durable.answer():
            self._ledger.abort_round(token, round_id, reason, self._durable.now())
