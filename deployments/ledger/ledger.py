"""The ledger: who is a member, which version the fleet is at, and what every member does next.

A pure state machine. It never waits, reads no clock and does no I/O: `now` is an argument, in
seconds; what others wait for is a `PendingCall` that some later event completes. Each public method ends in
`_advance`, which runs whatever became possible.

    publisher   acquire, connect, open_round, send, close_round ─► PendingCall   waits for the replicas
    replica     poll(Report) ─► Directive                                        waits for updates (the shell)
    shell       tick, lost, take_decisions                                       waits for the disk

Durability: the shell writes what `take_decisions` returns before anybody polls again; `recover`
folds it into a new ledger.
"""

from collections.abc import Iterable, Mapping

from pydantic import JsonValue

from deployments.errors import Conflict, RoundAborted
from deployments.ledger.admission import Admission
from deployments.ledger.commit_phase import CommitPhase
from deployments.ledger.connection import Connections
from deployments.ledger.decisions import Decision, DecisionLog
from deployments.ledger.desired_state import DesiredState
from deployments.ledger.dispatch import Dispatch
from deployments.ledger.event_log import EventLog
from deployments.ledger.lease import LeaseDesk, Publishers
from deployments.ledger.limits import LedgerConfig
from deployments.ledger.members import PendingCall
from deployments.ledger.membership import Membership
from deployments.ledger.recovery import recover
from deployments.ledger.staging_phase import StagingPhase
from deployments.ledger.store_assignment import StoreAssignment, StoreLocation, StoreWait
from deployments.ledger.version_state import VersionState
from deployments.protocol.instructions import Directive, JoinAnswer
from deployments.protocol.operations import Disconnect, Operation, Sleep
from deployments.protocol.publishing import Lease, PublisherSession, RoundOptions, RoundReport
from deployments.protocol.reports import Report
from deployments.protocol.status import Event, FleetStatus


class Ledger:
    """The whole state machine; its parts are one file each."""

    def __init__(self, config: LedgerConfig | None = None, store: StoreLocation | None = None) -> None:
        self._config = LedgerConfig() if config is None else config
        self._events = EventLog()
        self._decisions = DecisionLog()
        self._dispatch = dispatch = Dispatch(self._config)
        self._membership = members = Membership(self._config, self._decisions, self._events, dispatch)
        self._versions = versions = VersionState(self._decisions, self._events, dispatch)
        self._lease = LeaseDesk(self._config.lease_s)
        self._desired_state = desired = DesiredState(members, dispatch, self._decisions, self._events)
        self._commit_phase = commit = CommitPhase(members, dispatch, versions, desired, self._decisions)
        self._connections = connections = Connections(members, dispatch)
        self._staging = staging = StagingPhase(members, dispatch, versions, commit)
        self._publishers = Publishers(
            self._lease, versions, staging, connections, self._decisions, self._events
        )
        self._store_assignment = storing = StoreAssignment(members, dispatch, versions, self._events, store)
        self._store_wait = StoreWait(members, versions, self._events)
        self._admission = Admission(
            members, dispatch, versions, commit, staging, connections, storing, desired
        )

    # -- replicas -----------------------------------------------------------------------------

    def join(self, replica_id: str, incarnation: str, now: float) -> JoinAnswer:
        """What a starting replica loads. It becomes a member with its first poll, not before."""
        answer = self._admission.first_weights()
        self._events.record("join", now, replica=replica_id, incarnation=incarnation, version=answer.version)
        return answer

    def poll(self, report: Report, now: float) -> Directive:
        """Registration, heartbeat and acknowledgements in one; idempotent."""
        self.on_report(report, now)
        return self.directive(report, now)

    def on_report(self, report: Report, now: float) -> None:
        """The first half of a poll: take the report in."""
        self._admission.on_report(report, now)
        self._advance(now)

    def directive(self, report: Report, now: float) -> Directive:
        """The second half of a poll: its answer. A fence counts as delivered from here on."""
        directive = self._admission.directive(report)
        self._advance(now)
        return directive

    def has_updates(self, report: Report) -> bool:
        """Whether a directive would say anything that the last one to this replica did not."""
        return self._admission.has_updates(report)

    def is_complete(self) -> bool:
        """Whether every replica that served before a restart has polled again, or is given up."""
        return not self._membership.returning()

    def is_busy(self, report: Report) -> bool:
        """Whether this replica has instructions that it did not acknowledge yet."""
        member = self._membership.get(report.replica_id)
        return member is not None and bool(member.queue)

    def lost(self, replica_id: str, incarnation: str, reason: str, now: float) -> None:
        """The shell learned that this process is gone."""
        member = self._membership.find(replica_id, incarnation)
        if member is not None:
            self._membership.lose(member, reason, now)
            self._advance(now)

    def silent_since(self, before: float) -> list[tuple[str, str]]:
        """(replica id, incarnation) of the members that have not polled since `before`."""
        members = self._membership.all()
        return [(each.replica_id, each.incarnation) for each in members if each.last_poll < before]

    # -- publisher ----------------------------------------------------------------------------

    def acquire(self, publisher: str, now: float) -> Lease:
        """Issue the lease; see `Publishers.acquire`."""
        lease = self._publishers.acquire(publisher, now)
        self._advance(now)
        return lease

    def session(self, publisher: str, now: float) -> PublisherSession:
        """The session of a publisher whose calls carry no token; see `Publishers.session`."""
        session = self._publishers.session(publisher, now)
        self._advance(now)
        return session

    def renew(self, token: int, now: float) -> Lease:
        """Raises StalePublisher for any token but the current one, as do all calls of a publisher below."""
        return self._publishers.renew(token, now)

    def release(self, token: int, now: float) -> None:
        """Give the lease back; an undecided round is aborted."""
        self._publishers.release(token, now)
        self._advance(now)

    def connect(self, token: int, init_info: Mapping[str, JsonValue], now: float) -> PendingCall:
        """Every member joins the publisher's transfer group; see `Connections.connect`."""
        publisher = self.renew(token, now).publisher
        self._no_round("connect")
        call = self._connections.connect(publisher, init_info, now)
        self._advance(now)
        return call

    def disconnect(self, token: int, now: float) -> PendingCall:
        """Every serving replica closes its end of the connection."""
        self.renew(token, now)
        self._no_round("disconnect")
        self._connections.drop()
        return self.call(Disconnect(), now)

    def open_round(self, token: int, options: RoundOptions, now: float) -> int:
        """The round's id; see `StagingPhase.open`. Raises Conflict while the weights sleep."""
        self.renew(token, now)
        self._desired_state.check_awake()
        options = self._store_assignment.permitted(options)
        round_id = self._staging.open(options, self._connections.current, now)
        self._advance(now)
        return round_id

    def send(self, token: int, round_id: int, payload: JsonValue, now: float) -> PendingCall:
        """Every participant receives one payload; see `StagingPhase.send`."""
        self.renew(token, now)
        call = self._staging.send(round_id, payload, now)
        self._advance(now)
        return call

    def close_round(self, token: int, round_id: int, label: str | None, now: float) -> PendingCall:
        """The call's result is a RoundReport, its error why the round was aborted."""
        self.renew(token, now)
        call = self._staging.close(round_id, label, now)
        self._advance(now)
        return call

    def abort_round(self, token: int, round_id: int, reason: str, now: float) -> None:
        """Raises SlipstreamError if the round is not open, or is decided."""
        self.renew(token, now)
        current = self._versions.undecided(round_id)
        error = RoundAborted(f"round {round_id} aborted by its publisher: {reason}", {"round_id": round_id})
        self._staging.abort(current, error, now)
        self._advance(now)

    def call(self, operation: Operation, now: float) -> PendingCall:
        """Carry an operation out on every serving replica; see `DesiredState.call`."""
        if isinstance(operation, Sleep) and operation.level > 0:
            self._no_round("sleep")  # the memory of what is staged, and of what it replaces, would be gone
        call = self._desired_state.call(operation, now)
        self._advance(now)
        return call

    def set_stored(self, version: int, path: str, label: str | None, now: float) -> None:
        """A version is on disk now: joiners may load it. Raises InvalidRequest for one never committed."""
        self._store_assignment.set_stored(version, path, label, now)
        self._advance(now)

    def set_label(self, label: str, now: float) -> None:
        """Give the committed version another label."""
        self._versions.relabel(label, now)

    # -- time and memory ----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed: check deadlines and the lease."""
        self._membership.check_deadlines(now)
        self._advance(now)
        self._publishers.expire(now)
        self._advance(now)

    def credit(self, stalled_s: float, now: float) -> None:
        """The controller stood still for so long, until now: nobody could poll, acknowledge or renew."""
        self._membership.credit(stalled_s)
        self._lease.credit(stalled_s)
        self._store_assignment.credit(stalled_s)
        self._store_wait.credit(stalled_s)
        self._events.record("stall", now, stalled_s=round(stalled_s, 3))

    def take_decisions(self) -> list[Decision]:
        """Decisions made since the last call; to be durable before anybody polls."""
        return self._decisions.take()

    def recover(self, decisions: Iterable[Decision], now: float) -> None:
        """Fold an earlier process's decisions into this new ledger; called once, also with none."""
        recover(
            list(decisions),
            membership=self._membership,
            versions=self._versions,
            lease=self._lease,
            commit_phase=self._commit_phase,
            desired_state=self._desired_state,
            dispatch=self._dispatch,
            events=self._events,
            log=self._decisions,
            now=now,
        )
        self._advance(now)

    # -- queries ------------------------------------------------------------------------------

    @property
    def committed_version(self) -> int:
        return self._versions.committed_version

    def history(self) -> list[RoundReport]:
        """Rounds that ended, oldest first; bounded."""
        return self._versions.history()

    def events_since(self, event_id: int) -> list[Event]:
        return self._events.since(event_id)

    def status(self, now: float) -> FleetStatus:
        stored, current = self._versions.stored, self._versions.current
        connection, needed = self._connections.current, self._config.min_replicas
        return FleetStatus(
            committed_version=self._versions.committed_version,
            label=self._versions.label,
            stored_version=None if stored is None else stored.version,
            epoch=self._membership.epoch,
            ready=len(self._membership.serving()) >= needed,
            min_replicas=needed,
            workers=sum(member.world_size for member in self._membership.live()),
            members=tuple(member.status(now) for member in self._membership.all()),
            round=None if current is None else current.status(now),
            lease=self._lease.status(now),
            connection=None if connection is None else connection.status(),
            store_problem=self._store_assignment.problem or self._store_wait.problem,
            condition=self._desired_state.names(),
        )

    # -- progress -----------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Run what became possible until nothing more does."""
        progress = True
        while progress:
            self._connections.check_peers(now)
            progress = self._dispatch.run_completed(now)
            self._staging.check_quorum(now)
            self._staging.decide(now)
        self._admission.advance(now)
        self._store_assignment.advance(now)
        self._store_wait.advance(now)

    def _no_round(self, action: str) -> None:
        current = self._versions.current
        if current is not None:
            raise Conflict(
                f"cannot {action} while round {current.round_id} is {current.phase}",
                {"round_id": current.round_id},
            )
