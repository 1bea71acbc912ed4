"""The ledger: who is a member, which version the fleet is at, and what every member does next.

A pure state machine. It never waits, reads no clock and does no I/O: `now` is an argument, in
seconds; what others wait for is a `PendingCall` that some later event completes. Public methods end in
`advance`, which looks at all members and runs whatever became possible. `on_report` does not: from most
reports nothing can follow, and for those that come together one look is enough. What is missed by mistake
happens with the next tick.

    publisher   acquire, connect, open_round, send, close_round ─► PendingCall   waits for the replicas
    replica     poll(Report) ─► Directive                                        waits for updates (the shell)
    shell       tick, lost, take_decisions                                       waits for the disk

The shell writes what `take_decisions` returns before anybody polls again; `recover` folds it in.
"""

from collections.abc import Iterable, Mapping

from pydantic import JsonValue

from deployments.ledger.adapters.catalog import AdapterLimits
from deployments.ledger.adapters.loading import Adapters
from deployments.ledger.adapters.transfer import AdapterTransfers
from deployments.ledger.admission import Admission
from deployments.ledger.connection import Connections
from deployments.ledger.decisions import Decision, DecisionLog, EventLog
from deployments.ledger.desired_state import DesiredState
from deployments.ledger.dispatch import Dispatch, Drains
from deployments.ledger.lease import LeaseDesk, Publishers
from deployments.ledger.limits import FIXED, LedgerConfig, SizeLimits
from deployments.ledger.members import MemberState, PendingCall
from deployments.ledger.membership import Membership
from deployments.ledger.promises import Promises
from deployments.ledger.recovery import recover
from deployments.ledger.rounds.commit_phase import CommitPhase
from deployments.ledger.rounds.staging_phase import StagingPhase
from deployments.ledger.rounds.version_state import VersionState
from deployments.ledger.store_assignment import StoreAssignment, StoreLocation, StoreWait
from deployments.protocol.adapters import ReceiveAdapter
from deployments.protocol.engine_state import Disconnect, Operation, Sleep
from deployments.protocol.errors import RoundAborted
from deployments.protocol.poll import Directive, FilePart, JoinAnswer, Report, Unloadable
from deployments.protocol.publishing import JoinedLease, Lease, RoundOptions, RoundReport
from deployments.protocol.responses import Event, FleetHealth, FleetStatus, SizeStatus


class Ledger:
    """The whole state machine; its parts are one file each."""

    def __init__(
        self,
        config: LedgerConfig | None = None,
        store: StoreLocation | None = None,
        size: SizeLimits = FIXED,
        adapters: AdapterLimits | None = None,
    ) -> None:
        config = LedgerConfig() if config is None else config
        self._events = EventLog()
        self._decisions = log = DecisionLog()
        self._dispatch = dispatch = Dispatch(config)
        self._membership = members = Membership(config, self._decisions, self._events, dispatch, size)
        self._versions = versions = VersionState(self._decisions, self._events, dispatch)
        self._lease = LeaseDesk(config.lease_s)
        self._drains = drains = Drains(members, dispatch, self._events)
        self._desired_state = desired = DesiredState(members, dispatch, log, self._events, drains)
        self._commit_phase = commit = CommitPhase(members, dispatch, versions, desired, log, drains)
        self._connections = connections = Connections(members, dispatch)
        self._transfers = AdapterTransfers(members, dispatch, connections)
        self._staging = staging = StagingPhase(members, dispatch, versions, commit, connections, drains)
        self._publishers = Publishers(
            self._lease, versions, staging, connections, self._transfers, log, self._events
        )
        self._storing = storing = StoreAssignment(members, dispatch, versions, self._events, store)
        self._store_wait = StoreWait(members, versions, self._events)
        self.promises = promises = Promises(members, versions, self._decisions, self._events)
        limits = AdapterLimits() if adapters is None else adapters
        self.adapters = Adapters(members, dispatch, log, self._events, limits, desired.check_awake, versions)
        self._admission = Admission(
            members,
            dispatch,
            versions,
            commit,
            staging,
            connections,
            storing,
            desired,
            promises,
            drains,
            self.adapters,
        )

    # -- publishers: each call with a token raises StalePublisher for any but the current one -------

    def acquire(self, publisher: str, now: float) -> Lease:
        """Issue the lease; see `Publishers.acquire`."""
        lease = self._publishers.acquire(publisher, now)
        self.advance(now)
        return lease

    def join_lease(self, publisher: str, now: float, *, renew: bool) -> JoinedLease:
        """The lease of a publisher whose calls carry no token; see `Publishers.join_lease`."""
        joined = self._publishers.join_lease(publisher, now, renew=renew)
        self.advance(now)
        return joined

    def renew(self, token: int, now: float) -> Lease:
        """Raises StalePublisher for any token but the current one, as do all calls of a publisher below."""
        return self._publishers.renew(token, now)

    def release(self, token: int, now: float) -> None:
        """Give the lease back; an undecided round is aborted."""
        self._publishers.release(token, now)
        self.advance(now)

    def connect(self, token: int, init_info: Mapping[str, JsonValue], now: float) -> PendingCall:
        """Every member joins the publisher's transfer group; see `Connections.connect`."""
        publisher = self.renew(token, now).publisher
        self._versions.require_no_round("connect")
        call = self._connections.connect(publisher, init_info, now)
        self.advance(now)
        return call

    def disconnect(self, token: int, now: float) -> PendingCall:
        """Every serving replica closes its end of the connection."""
        self.renew(token, now)
        self._versions.require_no_round("disconnect")
        self._connections.drop()
        return self.call(Disconnect(), now)

    def open_round(self, token: int, options: RoundOptions, now: float) -> int:
        """The round's id; see `StagingPhase.open`. Raises Conflict while the weights sleep."""
        publisher = self.renew(token, now).publisher
        connection = None if options.file_bytes is not None else self._connections.of(publisher)
        self._desired_state.check_awake()
        round_id = self._staging.open(self._storing.permitted(options), connection, now)
        self.advance(now)
        return round_id

    def send(self, token: int, round_id: int, payload: JsonValue | FilePart, now: float) -> PendingCall:
        """Every participant receives one payload; see `StagingPhase.send`."""
        self.renew(token, now)
        call = self._staging.send(round_id, payload, now)
        self.advance(now)
        return call

    def send_adapter(self, token: int, load_id: str, payload: JsonValue, now: float) -> PendingCall:
        """Every member receives an adapter's files; see `AdapterTransfers.send`."""
        publisher = self.renew(token, now).publisher
        self._versions.require_no_round("send an adapter")
        call = self._transfers.send(publisher, ReceiveAdapter(load_id=load_id, payload=payload), now)
        self.advance(now)
        return call

    def close_round(self, token: int, round_id: int, label: str | None, now: float) -> PendingCall:
        """The call's result is a RoundReport. One that comes again is answered from the record."""
        call = self._versions.closed(round_id, label)
        if call is None:
            self.renew(token, now)
            call = self._staging.close(round_id, label, now)
        self.advance(now)
        return call

    def abort_round(self, token: int, round_id: int, reason: str, now: float) -> None:
        """Raises SlipstreamError if the round is not open, or is decided."""
        self.renew(token, now)
        current = self._versions.undecided(round_id)
        error = RoundAborted(f"round {round_id} aborted by its publisher: {reason}", {"round_id": round_id})
        self._staging.abort(current, error, now)
        self.advance(now)

    # -- replicas -----------------------------------------------------------------------------

    def join(
        self, replica_id: str, incarnation: str, now: float, unloadable: Unloadable | None = None
    ) -> JoinAnswer:
        """What a starting replica loads, or loads instead. It becomes a member with its first poll."""
        answer = self._admission.first_weights(replica_id, incarnation, unloadable, now)
        self._events.record("join", now, replica=replica_id, incarnation=incarnation, version=answer.version)
        return answer

    def poll(self, report: Report, now: float) -> Directive:
        """Registration, heartbeat and acknowledgements in one; idempotent."""
        if self.on_report(report, now):
            self.advance(now)
        return self.directive(report)

    def on_report(self, report: Report, now: float) -> bool:
        """The first half of a poll: take the report in. Raises FleetUnavailable if it was overtaken.

        Returns:
            Whether anything may follow from it: `advance` is due then, at the latest with the next tick.
        """
        return self._admission.on_report(report, now)

    def directive(self, report: Report) -> Directive:
        """The second half of a poll: its answer."""
        return self._admission.directive(report)

    def has_updates(self, report: Report) -> bool:
        """Whether a directive would say anything that the last one to this replica did not."""
        return self._admission.has_updates(report)

    def is_complete(self) -> bool:
        """Whether every replica that served before a restart has polled again, or is given up."""
        return not self._membership.returning()

    def is_busy(self, report: Report) -> bool:
        """Whether this replica works on an instruction, or drains: its next report is wanted soon."""
        return bool((it := self._membership.get(report.replica_id)) and (it.queue or it.draining))

    def lost(self, processes: Iterable[tuple[str, str]], reason: str, now: float) -> None:
        """The shell learned that these (replica id, incarnation) are gone."""
        for replica_id, incarnation in processes:
            self._admission.lost(replica_id, incarnation, reason, now)
        self.advance(now)

    def silent_since(self, before: float) -> list[tuple[str, str]]:
        """(replica id, incarnation) of those that have not polled since, starting ones too."""
        return self._membership.silent_since(before) + self.promises.starting(before)

    # -- the fleet -----------------------------------------------------------------------------

    def call(self, operation: Operation, now: float) -> PendingCall:
        """Carry an operation out on every serving replica; see `DesiredState.call`."""
        if isinstance(operation, Sleep) and operation.level > 0:  # what is staged, and live, would be gone
            self._versions.require_no_round("sleep")
        call = self._desired_state.call(operation, now)
        self.advance(now)
        return call

    def set_stored(self, version: int, path: str, label: str | None, now: float) -> None:
        """A version is on disk now: joiners may load it. Raises InvalidRequest for one never committed."""
        self._storing.set_stored(version, path, label, now)
        self.advance(now)

    def set_unstored(self, version: int, reason: str, now: float) -> None:
        """Its publisher could not write a version to the store."""
        self._store_wait.failed(version, reason, now)
        self.advance(now)

    def set_label(self, label: str, now: float) -> None:
        """Give the committed version another label."""
        self._versions.relabel(label, now)

    def scale(self, wanted: int | None, room: int | None, now: float) -> SizeStatus:
        """How many replicas there are to be; see `FleetSize.want`."""
        return self._membership.size.want(wanted, room, now, self._membership.all())

    def reconfigure(self, config: LedgerConfig) -> None:
        """Other limits from now on; the lease's duration is that of when it was issued."""
        self._membership.config = self._dispatch.config = config

    # -- time and memory ----------------------------------------------------------------------

    def tick(self, now: float) -> list[str]:
        """Time has passed: check deadlines and the lease.

        Returns:
            Ids of replicas that are lost because they were silent: the caller ends their processes, which may
            still exist. Nobody else learns of them.
        """
        silent = self._membership.check_deadlines(now)
        self.advance(now)
        self._publishers.expire(now)
        self.advance(now)
        return silent

    def credit(self, stalled_s: float, now: float) -> None:
        """The controller stood still for so long, until now: nobody could poll, acknowledge or renew."""
        parts = (self._drains, self._membership, self._lease, self._storing, self._store_wait)
        for part in (*parts, self.promises):
            part.credit(stalled_s)
        self._events.record("stall", now, stalled_s=round(stalled_s, 3))

    def take_decisions(self) -> list[Decision]:
        """Decisions made since the last call; to be durable before anybody polls."""
        return self._decisions.take()

    def recover(self, decisions: Iterable[Decision], now: float, new_fleet_id: str = "fleet") -> None:
        """Fold an earlier process's decisions, or none, into this new ledger; they may name the fleet."""
        recover(
            list(decisions),
            membership=self._membership,
            versions=self._versions,
            lease=self._lease,
            commit_phase=self._commit_phase,
            desired_state=self._desired_state,
            promises=self.promises,
            adapters=self.adapters,
            dispatch=self._dispatch,
            events=self._events,
            log=self._decisions,
            now=now,
            new_fleet_id=new_fleet_id,
        )
        self.advance(now)

    def serve(self, model: str) -> str | None:
        """The fleet serves this model. Returns the one that its versions or adapters are of, if another."""
        in_use = bool(self.committed_version or self.adapters.catalog.live)
        return self._versions.serve(model, in_use=in_use)

    # -- queries ------------------------------------------------------------------------------

    @property
    def committed_version(self) -> int:
        return self._versions.committed_version

    @property
    def size(self) -> int:
        """Members, whatever their state."""
        return len(self._membership)

    @property
    def heartbeat_timeout_s(self) -> float:
        """Without a poll for so long a member is lost."""
        return self._membership.config.heartbeat_timeout_s

    def history(self) -> list[RoundReport]:
        """Rounds that ended, oldest first; bounded."""
        return self._versions.history()

    def events_since(self, event_id: int) -> list[Event]:
        return self._events.since(event_id)

    def health(self) -> FleetHealth:
        members = self._membership.all()
        return FleetHealth(
            serving=sum(each.state is MemberState.SERVING and not each.leaving for each in members),
            members=len(members),
            committed_version=self._versions.committed_version,
        )

    def status(self, now: float) -> FleetStatus:
        stored, current, needed = self._versions.stored, self._versions.current, self._membership.needed
        return FleetStatus(
            fleet_id=self._versions.fleet_id,
            committed_version=self._versions.committed_version,
            label=self._versions.label,
            stored_version=None if stored is None else stored.version,
            epoch=self._membership.epoch,
            ready=len(self._membership.serving()) >= needed,
            min_replicas=needed,
            size=self._membership.size.status(self._membership.all()),
            workers=sum(member.world_size for member in self._membership.for_round()),
            members=tuple(member.status(now) for member in self._membership.all()),
            round=None if current is None else current.status(now),
            lease=self._lease.status(now),
            connection=self._connections.status(),
            store_problem=self._storing.problem or self.promises.problem or self._store_wait.problem,
            condition=self._desired_state.names(),
            rounds_ended=self._versions.rounds_ended(),
        )

    # -- progress -----------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Run what became possible until nothing more does; again whenever the members have changed."""
        epoch = None
        while epoch != self._membership.epoch:
            epoch = self._membership.epoch
            self._advance_once(now)

    def _advance_once(self, now: float) -> None:
        self._drains.advance(self._versions.current_id, now)
        progress = True
        while progress:
            self._connections.check_peers(now)
            self._transfers.check_peers(now)
            progress = self._dispatch.run_completed(now)
            self._staging.check_quorum(now)
            self._staging.decide(now)
            progress = self._commit_phase.advance(now) or progress
        self._connections.bring_in(now)
        for part in (self.adapters, self._admission, self.promises, self._storing, self._store_wait):
            part.advance(now)
