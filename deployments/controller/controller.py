"""The controller: the ledger with a clock, a disk and somebody to wait for.

    replica    poll ──► waits up to `poll_s` for news of its own ──► Directive
    publisher  connect, open_round, send, close_round ──► waits until the replicas are through
    here       a ticker: deadlines, leases, and whether quiet members' processes still exist

Every call changes the ledger and makes its decisions durable within one step of the event loop, so
nobody can hear of a decision that is not on disk. If the disk fails, the controller stops answering
and its health check fails: the next process recovers from what is written.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deployments.controller.journal import Journal
from deployments.controller.liveness import IsAlive
from deployments.errors import FleetUnavailable, InvalidRequest
from deployments.ledger.ledger import Ledger
from deployments.ledger.limits import LedgerConfig
from deployments.ledger.members import Task
from deployments.ledger.store_assignment import StorePlace
from deployments.logs import serve_logger
from deployments.protocol import (
    Directive,
    FleetOperation,
    JoinAnswer,
    Lease,
    Manifest,
    Report,
    RoundOptions,
    RoundReport,
)
from deployments.weights.store.versions import DEFAULT_MAX_VERSIONS, Store

logger = serve_logger()

BUSY_POLL_S = 0.2  # a replica that works paces itself, and wants to get back to its work
MAX_EVENTS_WAIT_S = 30.0


class Controller:
    """One per fleet.

    Args:
        state_dir: where decisions are kept; a restarted controller needs the same one.
        store_dir: where committed versions are kept.
        keep: how many of them.
        outside_versions: whether replicas write those that their publisher does not write.
        is_alive: whether the process of a replica (by id) exists; called in a thread.
        poll_s: how long a poll without news waits.
        quiet_s: a member that has not polled for this long is looked up; more than `poll_s`.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        *,
        config: LedgerConfig,
        state_dir: str,
        store_dir: str,
        is_alive: IsAlive,
        keep: int = DEFAULT_MAX_VERSIONS,
        outside_versions: bool = True,
        poll_s: float = 1.0,
        quiet_s: float = 2.0,
        tick_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._poll_s = poll_s
        self._quiet_s = quiet_s
        self._tick_s = tick_s
        self._is_alive = is_alive
        self._store = Store(Path(store_dir), max_versions=keep)
        self._journal = Journal(Path(state_dir))
        place = StorePlace(directory=store_dir, keep=keep) if outside_versions else None
        self._ledger = Ledger(config, place)
        self._ledger.recover(self._journal.recovered, clock())
        self._journal.append(self._ledger.take_decisions())
        self._changed = asyncio.Event()
        self._polls: dict[str, object] = {}  # incarnation -> its newest poll; an older one is void
        self._ticker: asyncio.Task[None] | None = None
        self._broken: str | None = None

    # -- replicas -----------------------------------------------------------------------------

    async def join(self, replica_id: str, incarnation: str) -> JoinAnswer:
        self._enter()
        answer = self._ledger.join(replica_id, incarnation, self._clock())
        self._publish()
        return answer

    async def poll(self, report: Report) -> Directive:
        """Waits until there is something to say to this replica, at most `poll_s`."""
        self._enter()
        mine = self._polls[report.incarnation] = object()
        self._ledger.hear(report, self._clock())
        self._publish()
        try:
            wait_s = BUSY_POLL_S if self._ledger.is_busy(report) else self._poll_s
            await self._wait(
                lambda: self._polls.get(report.incarnation) is not mine or self._ledger.has_news(report),
                wait_s,
            )
            if self._polls.get(report.incarnation) is not mine:
                raise FleetUnavailable(f"a newer poll of {report.replica_id} took this one's place")
            directive = self._ledger.directive(report, self._clock())
            self._publish()
            return directive
        finally:
            if self._polls.get(report.incarnation) is mine:
                del self._polls[report.incarnation]

    # -- publisher ----------------------------------------------------------------------------

    async def acquire(self, publisher: str) -> Lease:
        """Raises Conflict while another publisher holds the lease."""
        self._enter()
        lease = self._ledger.acquire(publisher, self._clock())
        self._publish()
        return lease

    async def session(self, publisher: str) -> tuple[int, int | None]:
        """The token and the open round of a publisher whose calls carry no token; acquires if need be."""
        self._enter()
        session = self._ledger.session(publisher, self._clock())
        self._publish()
        return session

    async def renew(self, token: int) -> Lease:
        """To be called well within the lease's duration, also while waiting for another call."""
        self._enter()
        lease = self._ledger.renew(token, self._clock())
        self._publish()
        return lease

    async def release(self, token: int) -> None:
        self._enter()
        self._ledger.release(token, self._clock())
        self._publish()

    async def connect(self, token: int, init_info: Mapping[str, Any]) -> int:
        """Returns a connection id once every replica is connected."""
        self._enter()
        task = self._ledger.connect(token, init_info, self._clock())
        return int(await self._result(task))

    async def disconnect(self, token: int) -> dict[str, Any]:
        self._enter()
        task = self._ledger.disconnect(token, self._clock())
        return dict(await self._result(task))

    async def open_round(
        self, token: int, manifest: Manifest | None = None, options: RoundOptions | None = None
    ) -> int:
        """Returns the round's id once every participant is ready to receive."""
        self._enter()
        await self._wait(self._ledger.is_complete, None)
        chosen = RoundOptions() if options is None else options
        task = self._ledger.open_round(token, manifest, chosen, self._clock())
        return int(await self._result(task))

    async def send(self, token: int, round_id: int, payload: Any) -> None:
        """Returns once every participant has received. A collective's data must flow meanwhile."""
        self._enter()
        await self._result(self._ledger.send(token, round_id, payload, self._clock()))

    async def close_round(
        self, token: int, round_id: int, manifest: Manifest | None = None, label: str | None = None
    ) -> RoundReport:
        """Raises RoundAborted, or InvalidRequest when every replica rejected what was sent."""
        self._enter()
        task = self._ledger.close_round(token, round_id, manifest, label, self._clock())
        report: RoundReport = await self._result(task)
        return report

    async def abort_round(self, token: int, round_id: int, reason: str) -> None:
        self._enter()
        self._ledger.abort_round(token, round_id, reason, self._clock())
        self._publish()

    async def call(self, operation: FleetOperation | str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Carry an operation out on every serving replica: {replica id: value}, or an error naming those
        that did not."""
        self._enter()
        # After a restart: not without those that still serve.
        await self._wait(self._ledger.is_complete, None)
        task = self._ledger.call(FleetOperation(operation), arguments, self._clock())
        return dict(await self._result(task))

    # -- the store ----------------------------------------------------------------------------

    async def stored(self, version: int, path: str, label: str | None = None) -> None:
        """The trainer wrote a committed version to the store: joiners may load it."""
        self._enter()
        self._ledger.set_stored(version, path, label, self._clock())
        self._publish()

    async def rollback_source(self, version: int) -> str:
        """The directory of a stored version, to be published as an ordinary round."""
        kept = list(await asyncio.to_thread(self._store.list))
        if version not in kept:
            raise InvalidRequest(
                f"version: expected one in the store {kept}, got {version}",
                {"expected": kept, "actual": version},
            )
        return str(self._store.path_of(version))

    async def set_label(self, label: str) -> None:
        """Name the committed version anew."""
        self._enter()
        self._ledger.set_label(label, self._clock())
        self._publish()

    # -- queries ------------------------------------------------------------------------------

    async def fleet(self) -> dict[str, Any]:
        self._enter()
        return self._ledger.status(self._clock())

    async def rounds(self) -> list[RoundReport]:
        """Rounds that ended, oldest first."""
        self._enter()
        return self._ledger.history()

    async def events(self, since: int = 0, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Events with a greater id than `since`; waits for the first one, at most `wait_s`."""
        self._enter()
        await self._wait(lambda: bool(self._ledger.events_since(since)), min(wait_s, MAX_EVENTS_WAIT_S))
        wall = time.time() - self._clock()
        return [{**event, "at": round(event["at"] + wall, 3)} for event in self._ledger.events_since(since)]

    async def check_health(self) -> None:
        """Serve's health check."""
        self._enter()

    # -- waiting ------------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._broken is not None:
            raise FleetUnavailable(f"the controller cannot write its decisions: {self._broken}")
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    def _publish(self) -> None:
        """Make decisions durable, then let those who wait look again."""
        decisions = self._ledger.take_decisions()
        try:
            self._journal.append(decisions)
        except Exception as error:  # whatever it was, the decision is not on the disk
            self._broken = str(error)
            logger.error("decisions lost: %s", error)
            self._enter()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _result(self, task: Task) -> Any:
        """Wait for an errand. The ledger's deadlines bound the wait."""
        self._publish()
        await self._wait(lambda: task.done, None)
        if task.error is not None:
            raise type(task.error)(task.error.message, task.error.detail)
        return task.result

    async def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not ready():
                    await self._changed.wait()
                    self._enter()
        except TimeoutError:
            return

    # -- time ---------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while self._broken is None:
            await asyncio.sleep(self._tick_s)
            try:
                self._ledger.tick(self._clock())
                self._publish()
                await self._look_for_the_dead()
            except Exception:  # the ticker is the only guard of every deadline: it must go on
                logger.exception("controller tick failed")

    async def _look_for_the_dead(self) -> None:
        for replica_id, incarnation in self._ledger.silent_since(self._clock() - self._quiet_s):
            if not await asyncio.to_thread(self._is_alive, replica_id):
                self._ledger.lost(replica_id, incarnation, "its process is gone", self._clock())
                self._publish()

    async def aclose(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        self._journal.close()
