"""The ledger: who is a member, which version the fleet is at, and what everybody does next.

A pure state machine. It never waits, reads no clock and does no I/O: `now` is an argument, in
seconds; what others wait for is a `Task` that some later call completes. Each public method ends in
`_advance`, which runs whatever became possible.

    publisher   acquire, connect, open_round, send, close_round ─► Task      waits for the replicas
    replica     poll(Report) ─► Directive                                    waits for news (the shell)
    shell       tick, lost, take_decisions                                   waits for the disk

Durability: the shell writes what `take_decisions` returns before anybody polls again; `recover`
folds it into a new ledger.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from deployments.errors import Conflict, RoundAborted
from deployments.ledger.admission import Admission
from deployments.ledger.commit_phase import CommitPhase
from deployments.ledger.connections import Connections
from deployments.ledger.decisions import Decision, LeaseIssued
from deployments.ledger.desired_state import Operations
from deployments.ledger.event_log import EventLog
from deployments.ledger.fleet import Fleet
from deployments.ledger.lease import LeaseDesk
from deployments.ledger.limits import LedgerConfig
from deployments.ledger.members import MemberState, Task
from deployments.ledger.recovery import recover
from deployments.ledger.staging_phase import StagingPhase
from deployments.ledger.status import fleet_status
from deployments.ledger.store_assignment import Persistence, StorePlace
from deployments.ledger.version_state import RoundBook
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


class Ledger:
    def __init__(self, config: LedgerConfig | None = None, store: StorePlace | None = None) -> None:
        self.config = LedgerConfig() if config is None else config
        self._events = EventLog()
        self._fleet = Fleet(self.config, self._events)
        self._book = RoundBook(self._fleet)
        self._lease = LeaseDesk(self.config.lease_s)
        self._operations = Operations(self._fleet)
        self._commit_phase = CommitPhase(self._fleet, self._book, self._operations)
        self._connections = Connections(self._fleet)
        self._staging = StagingPhase(self._fleet, self._book, self._commit_phase)
        self._persistence = Persistence(self._fleet, self._book, store)
        self._admission = Admission(
            self._fleet,
            self._book,
            self._commit_phase,
            self._staging,
            self._connections,
            self._persistence,
            self._operations,
        )

    # -- replicas -----------------------------------------------------------------------------

    def join(self, replica_id: str, incarnation: str, now: float) -> JoinAnswer:
        """What a starting replica loads. It becomes a member with its first poll, not before."""
        answer = self._admission.first_weights()
        self._events.record("join", now, replica=replica_id, incarnation=incarnation, version=answer.version)
        return answer

    def poll(self, report: Report, now: float) -> Directive:
        """Registration, heartbeat and acknowledgements in one; idempotent."""
        self.hear(report, now)
        return self.directive(report, now)

    def hear(self, report: Report, now: float) -> None:
        self._admission.hear(report, now)
        self._advance(now)

    def directive(self, report: Report, now: float) -> Directive:
        """What this replica is told now; a fence counts as told from here on."""
        directive = self._admission.directive(report)
        self._advance(now)
        return directive

    def has_news(self, report: Report) -> bool:
        """Whether a directive would say anything that the last one to this replica did not."""
        return self._admission.has_news(report)

    def is_complete(self) -> bool:
        """Whether every replica that served before a restart was heard of again, or given up."""
        return not any(each.state is MemberState.RETURNING for each in self._fleet.members.values())

    def is_busy(self, report: Report) -> bool:
        """Whether this replica has instructions that it did not acknowledge yet."""
        member = self._fleet.members.get(report.replica_id)
        return member is not None and bool(member.orders)

    def lost(self, replica_id: str, incarnation: str, reason: str, now: float) -> None:
        """The shell learned that this process is gone."""
        member = self._fleet.members.get(replica_id)
        if member is not None and member.incarnation == incarnation:
            self._fleet.lose(member, reason, now)
            self._advance(now)

    def silent_since(self, before: float) -> list[tuple[str, str]]:
        """(replica id, incarnation) of the members that have not polled since `before`."""
        members = self._fleet.members.values()
        return [(each.replica_id, each.incarnation) for each in members if each.seen < before]

    # -- publisher ----------------------------------------------------------------------------

    def acquire(self, publisher: str, now: float) -> Lease:
        """The same publisher may come again: its old token is stale from then on, its open round gone."""
        self._expire_lease(now)
        before = self._lease.held
        lease = self._lease.acquire(publisher, now)
        self._fleet.decisions.append(LeaseIssued(token=lease.token, publisher=publisher))
        self._events.record("lease", now, publisher=publisher, token=lease.token)
        if before is not None:
            self._abort_undecided(f"{publisher!r} took a new lease", now)
        self._connections.taken_by(publisher)
        self._advance(now)
        return lease

    def session(self, publisher: str, now: float) -> tuple[int, int | None]:
        """The token and the open round of a publisher whose calls carry no token (vLLM's clients)."""
        self._expire_lease(now)
        held = self._lease.held
        if held is None or held.publisher != publisher:
            return self.acquire(publisher, now).token, None
        self._lease.renew(held.token, now)
        current = self._book.current
        return held.token, None if current is None else current.round_id

    def renew(self, token: int, now: float) -> Lease:
        self._expire_lease(now)
        return self._lease.renew(token, now)

    def release(self, token: int, now: float) -> None:
        self.renew(token, now)
        self._abort_undecided("its publisher released the lease", now)
        self._lease.release()
        self._advance(now)

    def connect(self, token: int, init_info: Mapping[str, Any], now: float) -> Task:
        """Every member joins the publisher's transfer group, each with its own rank offset."""
        publisher = self.renew(token, now).publisher
        self._no_round("connect")
        task = self._connections.connect(publisher, init_info, now)
        self._advance(now)
        return task

    def disconnect(self, token: int, now: float) -> Task:
        self.renew(token, now)
        self._no_round("disconnect")
        self._connections.drop()
        return self.call(FleetOperation.DISCONNECT, {}, now)

    def open_round(self, token: int, manifest: Manifest | None, options: RoundOptions, now: float) -> Task:
        """The task's result is the round's id; it is done when every participant has begun."""
        self.renew(token, now)
        self._operations.check_awake()
        options = self._persistence.allowed(options)
        task = self._staging.open(manifest, options, self._connections.current, now)
        self._advance(now)
        return task

    def send(self, token: int, round_id: int, payload: Any, now: float) -> Task:
        self.renew(token, now)
        task = self._staging.send(round_id, payload, now)
        self._advance(now)
        return task

    def close_round(
        self, token: int, round_id: int, manifest: Manifest | None, label: str | None, now: float
    ) -> Task:
        """The task's result is a RoundReport, its error why the round was aborted."""
        self.renew(token, now)
        task = self._staging.close(round_id, manifest, label, now)
        self._advance(now)
        return task

    def abort_round(self, token: int, round_id: int, reason: str, now: float) -> None:
        self.renew(token, now)
        current = self._book.undecided(round_id)
        error = RoundAborted(f"round {round_id} aborted by its publisher: {reason}", {"round_id": round_id})
        self._staging.abort(current, error, now)
        self._advance(now)

    def call(self, operation: FleetOperation, arguments: Mapping[str, Any], now: float) -> Task:
        """The task's result is {replica id: value}; its error names the replicas that could not."""
        if operation is FleetOperation.SLEEP and arguments.get("level", 1):
            self._no_round("sleep")  # what is staged, and what it goes to, would be gone
        task = self._operations.call(operation, arguments, now)
        self._advance(now)
        return task

    def set_stored(self, version: int, path: str, label: str | None, now: float) -> None:
        """A version is on disk now. Joiners may load it from there."""
        self._persistence.set_stored(version, path, label, now)
        self._advance(now)

    def set_label(self, label: str, now: float) -> None:
        """Name the committed version anew."""
        self._book.relabel(label, now)

    # -- time and memory ----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        self._fleet.check_deadlines(now)
        self._advance(now)
        self._expire_lease(now)
        self._advance(now)

    def take_decisions(self) -> list[Decision]:
        """Decisions made since the last call; to be durable before anybody polls."""
        taken, self._fleet.decisions = self._fleet.decisions, []
        return taken

    def recover(self, decisions: Iterable[Decision], now: float) -> None:
        """Fold an earlier process's decisions into this new ledger; called once, also with none."""
        recover(
            list(decisions),
            fleet=self._fleet,
            book=self._book,
            lease=self._lease,
            commit_phase=self._commit_phase,
            operations=self._operations,
            now=now,
        )
        self._advance(now)

    # -- queries ------------------------------------------------------------------------------

    @property
    def committed_version(self) -> int:
        return self._book.committed_version

    def history(self) -> list[RoundReport]:
        """Rounds that ended, oldest first; bounded."""
        return list(self._book.history)

    def events_since(self, event_id: int) -> list[dict[str, Any]]:
        return self._events.since(event_id)

    def status(self, now: float) -> dict[str, Any]:
        """JSON for `/fleet`."""
        return {
            **fleet_status(self._fleet, self._book, self._lease, self._connections.current, now),
            "store_problem": self._persistence.problem,
            "condition": [step.operation.value for step in self._operations.condition],
        }

    # -- what follows -------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Run what became possible until nothing more does."""
        progress = True
        while progress:
            self._connections.check_meeting(now)
            progress = self._fleet.settle(now)
            self._staging.check_quorum(now)
            self._staging.decide(now)
        self._admission.advance(now)
        self._persistence.advance(now)

    def _no_round(self, action: str) -> None:
        current = self._book.current
        if current is not None:
            raise Conflict(
                f"cannot {action} while round {current.round_id} is {current.phase}",
                {"round_id": current.round_id},
            )

    def _expire_lease(self, now: float) -> None:
        """From the close on the round needs its publisher no more, and the wait is not held against it."""
        held = self._lease.held
        if held is None:
            return
        current = self._book.current
        closing = current is not None and current.close is not None
        if closing:
            self._lease.renew(held.token, now)
        elif self._lease.remaining_s(now) <= 0:
            self._lease.release()
            self._events.record("lease_expired", now, publisher=held.publisher, token=held.token)
            self._abort_undecided(f"the lease of {held.publisher!r} expired", now)

    def _abort_undecided(self, why: str, now: float) -> None:
        self._connections.give_up(now)
        current = self._book.current
        if current is not None and not current.decided:
            error = RoundAborted(f"round {current.round_id} aborted: {why}", {"round_id": current.round_id})
            self._staging.abort(current, error, now)
