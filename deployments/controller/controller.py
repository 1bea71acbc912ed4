"""The controller: the ledger with a clock, a disk and long polls.

    replica    poll ──► waits up to `poll_s` for updates of its own ──► Directive
    publisher  connect, send, close_round ──► waits until the replicas have answered

What waits, ticks and writes to the disk is in `durable_ledger`.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import JsonValue

from deployments.controller.durable_ledger import DurableLedger
from deployments.controller.liveness import IsAlive
from deployments.errors import FleetUnavailable, InvalidRequest
from deployments.ledger.ledger import Ledger
from deployments.ledger.limits import LedgerConfig
from deployments.ledger.store_assignment import StoreLocation
from deployments.protocol.instructions import Directive, JoinAnswer
from deployments.protocol.json_values import json_only
from deployments.protocol.operations import Operation
from deployments.protocol.publishing import Lease, PublisherSession, RoundOptions, RoundReport
from deployments.protocol.reports import Report
from deployments.protocol.status import Event, FleetStatus
from deployments.weights.store.versions import DEFAULT_MAX_VERSIONS, Store

BUSY_POLL_S = 0.2  # a replica that carries out an instruction paces itself, and polls again soon
MAX_EVENTS_WAIT_S = 30.0


class Controller:
    """Serve's deployment class of the controller; one per fleet.

    Args:
        state_dir: where decisions are kept; a restarted controller needs the same one.
        store_dir: where committed versions are kept.
        max_versions: how many of them.
        outside_versions: whether replicas write those that their publisher does not write.
        is_alive: whether the process of a replica (by id) exists; called in a thread.
        poll_s: how long a poll without updates waits.
        silent_s: the process of a member that has not polled for this long is looked up; more than `poll_s`.
        clock: seconds, monotonic.

    Raises:
        JournalError: the state directory cannot be used.
    """

    def __init__(
        self,
        *,
        config: LedgerConfig,
        state_dir: str,
        store_dir: str,
        is_alive: IsAlive,
        max_versions: int = DEFAULT_MAX_VERSIONS,
        outside_versions: bool = True,
        poll_s: float = 1.0,
        silent_s: float = 2.0,
        tick_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._poll_s = poll_s
        self._store = Store(Path(store_dir), max_versions=max_versions)
        location = StoreLocation(directory=store_dir, max_versions=max_versions)
        self._ledger = Ledger(config, location if outside_versions else None)
        self._durable = DurableLedger(
            self._ledger, Path(state_dir), is_alive=is_alive, silent_s=silent_s, tick_s=tick_s, clock=clock
        )
        self._polls: dict[str, object] = {}  # incarnation -> its newest poll; older ones are superseded

    # -- replicas -----------------------------------------------------------------------------

    async def join(self, replica_id: str, incarnation: str) -> JoinAnswer:
        self._durable.enter()
        answer = self._ledger.join(replica_id, incarnation, self._durable.now())
        self._durable.publish()
        return answer

    async def poll(self, report: Report) -> Directive:
        """Wait for updates for this replica, at most `poll_s`.

        Raises:
            FleetUnavailable: a newer poll of the same replica superseded this one.
        """
        self._durable.enter()
        mine = self._polls[report.incarnation] = object()
        self._ledger.on_report(report, self._durable.now())
        self._durable.publish()
        try:
            wait_s = BUSY_POLL_S if self._ledger.is_busy(report) else self._poll_s
            await self._durable.wait(
                lambda: self._polls.get(report.incarnation) is not mine or self._ledger.has_updates(report),
                wait_s,
            )
            if self._polls.get(report.incarnation) is not mine:
                raise FleetUnavailable(f"a newer poll of {report.replica_id} superseded this one")
            directive = self._ledger.directive(report, self._durable.now())
            self._durable.publish()
            return directive
        finally:
            if self._polls.get(report.incarnation) is mine:
                del self._polls[report.incarnation]

    # -- publisher ----------------------------------------------------------------------------

    async def acquire(self, publisher: str) -> Lease:
        """The lease, to publish.

        Raises:
            Conflict: another publisher holds it.
            FleetUnavailable: an update could not be recorded.
        """
        self._durable.enter()
        self._durable.check_space()
        lease = self._ledger.acquire(publisher, self._durable.now())
        self._durable.publish()
        return lease

    async def session(self, publisher: str) -> PublisherSession:
        """The token and the open round of a publisher whose calls carry no token; acquires if needed.

        Raises:
            Conflict: another publisher holds the lease.
        """
        self._durable.enter()
        session = self._ledger.session(publisher, self._durable.now())
        self._durable.publish()
        return session

    async def renew(self, token: int) -> Lease:
        """To be called well within the lease's duration, also while waiting for another call.

        Raises:
            StalePublisher: the token is not the current one, as in all calls of a publisher below.
        """
        self._durable.enter()
        lease = self._ledger.renew(token, self._durable.now())
        self._durable.publish()
        return lease

    async def release(self, token: int) -> None:
        """Give the lease back; an undecided round is aborted."""
        self._durable.enter()
        self._ledger.release(token, self._durable.now())
        self._durable.publish()

    async def connect(self, token: int, init_info: Mapping[str, JsonValue]) -> int:
        """Returns a connection id once every replica is connected.

        Raises:
            InvalidRequest: `init_info` is not JSON, does not fit the members, or no replica could connect.
            Conflict: a replica is gone; connect again.
        """
        self._durable.enter()
        checked = json_only(init_info, "init_info")
        if not isinstance(checked, dict):
            raise InvalidRequest(f"init_info: expected an object, got {type(init_info).__name__}")
        return int(await self._durable.result(self._ledger.connect(token, checked, self._durable.now())))

    async def disconnect(self, token: int) -> dict[str, JsonValue]:
        """Every serving replica closes its end of the connection."""
        self._durable.enter()
        return dict(await self._durable.result(self._ledger.disconnect(token, self._durable.now())))

    async def open_round(self, token: int, options: RoundOptions | None = None) -> int:
        """Returns the round's id.

        Raises:
            Conflict: another round is open, the weights sleep, or the publisher must connect again.
            FleetUnavailable: too few replicas, or the round could not be recorded.
        """
        self._durable.enter()
        self._durable.check_space()
        await self._durable.wait(self._ledger.is_complete, None)
        chosen = RoundOptions() if options is None else options
        round_id = self._ledger.open_round(token, chosen, self._durable.now())
        self._durable.publish()
        return round_id

    async def send(self, token: int, round_id: int, payload: JsonValue) -> None:
        """Returns once every participant has received. A collective's data must flow meanwhile.

        Raises:
            InvalidRequest: the payload is not JSON, or every replica rejected it.
            RoundAborted: the round ended.
        """
        self._durable.enter()
        checked = json_only(payload, "payload")
        await self._durable.result(self._ledger.send(token, round_id, checked, self._durable.now()))

    async def close_round(self, token: int, round_id: int, label: str | None = None) -> RoundReport:
        """Verify and commit; returns when every participant has swapped.

        Raises:
            InvalidRequest: every replica rejected what was sent.
            RoundAborted: the round was aborted for another reason.
        """
        self._durable.enter()
        call = self._ledger.close_round(token, round_id, label, self._durable.now())
        report: RoundReport = await self._durable.result(call)
        return report

    async def abort_round(self, token: int, round_id: int, reason: str) -> None:
        """The fleet goes on serving the old version."""
        self._durable.enter()
        self._ledger.abort_round(token, round_id, reason, self._durable.now())
        self._durable.publish()

    async def call(self, operation: Operation) -> dict[str, JsonValue]:
        """Carry an operation out on every serving replica: its answers by replica id.

        Raises:
            InvalidRequest: replicas rejected it.
            Conflict: it is not possible in the fleet's condition, or during a round.
            ReplicaUnavailable: names the replicas that did not carry it out.
        """
        self._durable.enter()
        # After a restart: not without those that still serve.
        await self._durable.wait(self._ledger.is_complete, None)
        return dict(await self._durable.result(self._ledger.call(operation, self._durable.now())))

    # -- the store ----------------------------------------------------------------------------

    async def stored(self, version: int, path: str, label: str | None = None) -> None:
        """The trainer wrote a committed version to the store: joiners may load it.

        Raises:
            InvalidRequest: the fleet never committed it.
        """
        self._durable.enter()
        self._ledger.set_stored(version, path, label, self._durable.now())
        self._durable.publish()

    async def rollback_source(self, version: int) -> str:
        """The directory of a stored version, to be published as an ordinary round.

        Raises:
            InvalidRequest: the version is not in the store.
        """
        stored = list(await asyncio.to_thread(self._store.list))
        if version not in stored:
            raise InvalidRequest(
                f"version: expected one in the store {stored}, got {version}",
                {"expected": stored, "actual": version},
            )
        return str(self._store.path_of(version))

    async def set_label(self, label: str) -> None:
        """Give the committed version another label.

        Raises:
            FleetUnavailable: it could not be recorded.
        """
        self._durable.enter()
        self._durable.check_space()
        self._ledger.set_label(label, self._durable.now())
        self._durable.publish()

    # -- queries ------------------------------------------------------------------------------

    async def fleet(self) -> FleetStatus:
        self._durable.enter()
        return self._ledger.status(self._durable.now())

    async def rounds(self) -> list[RoundReport]:
        """Rounds that ended, oldest first."""
        self._durable.enter()
        return self._ledger.history()

    async def events(self, since: int = 0, wait_s: float = 0.0) -> list[Event]:
        """Events with a greater id than `since`; waits for the first one, at most `wait_s` seconds."""
        self._durable.enter()
        await self._durable.wait(
            lambda: bool(self._ledger.events_since(since)), min(wait_s, MAX_EVENTS_WAIT_S)
        )
        wall = time.time() - self._durable.now()
        return [replace(event, at=round(event.at + wall, 3)) for event in self._ledger.events_since(since)]

    async def check_health(self) -> None:
        """Serve's health check."""
        self._durable.enter()

    async def aclose(self) -> None:
        """Stop the ticker and close the journal."""
        await self._durable.aclose()
