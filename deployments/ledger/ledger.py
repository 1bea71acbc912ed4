"""The ledger: who is a member, which version the fleet is at, and what every member does next.

Each public method is one event at `now` seconds; it ends in `advance`, which runs what became possible.
`on_report` does not: one look suffices for reports that come together, and a tick catches what is missed.

    publisher   acquire, connect, open_round, send, close_round ─► PendingCall   waits for the replicas
    replica     poll(Report) ─► Directive                                        waits for updates (the shell)
    shell       tick, lost, take_decisions                                       waits for the disk

The shell writes what `take_decisions` returns before any replica polls again; `recover` folds it in.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile

from pydantic import JsonValue

from deployments.ledger import (
    adapter_loads,
    admission,
    commit_phase,
    desired_state,
    membership,
    proof,
    publisher_session,
    recovery,
    staging_phase,
    stored_versions,
)
from deployments.ledger.decisions import Decision, Labelled, Scaled
from deployments.ledger.state import Member, MemberState, PendingCall, State
from deployments.protocol import responses
from deployments.protocol.adapters import Adapter, AdapterFiles, AdapterStatus, LoadRequest
from deployments.protocol.engine_state import Disconnect, Operation, Sleep
from deployments.protocol.errors import RoundAborted, SlipstreamError
from deployments.protocol.ledger_config import FIXED, AdapterLimits, LedgerConfig, SizeLimits
from deployments.protocol.poll import (
    DesiredReplicas,
    Directive,
    FilePart,
    JoinAnswer,
    Report,
    Scores,
    StoredVersion,
    Unloadable,
)
from deployments.protocol.publishing import JoinedLease, Lease, RoundOptions, RoundReport


class Ledger:
    def __init__(
        self,
        config: LedgerConfig | None = None,
        size: SizeLimits = FIXED,
        adapters: AdapterLimits | None = None,
    ) -> None:
        self.state = State(
            config=LedgerConfig() if config is None else config,
            size_limits=size,
            adapter_limits=AdapterLimits() if adapters is None else adapters,
            desired=DesiredReplicas(wanted=size.wanted),
        )

    def _at(self, now: float) -> State:
        self.state.now = now
        return self.state

    def acquire(self, publisher: str, now: float) -> Lease:
        """A holder that acquires again gets a new lease: its old token is stale, its open round aborted.
        Raises Conflict if another publisher holds it."""
        state = self._at(now)
        self._expire()
        lease = publisher_session.acquire(state, publisher)
        staging_phase.abandon(state, f"{publisher!r} took a new lease")
        self.advance(now)
        return lease

    def join_lease(self, publisher: str, now: float, *, renew: bool) -> JoinedLease:
        """The lease for calls without a token (vLLM's clients). It gives way to another publisher's unless a
        round is open.

        `renew`: the call belongs to the open round. Other calls must not keep a lost publisher's round.
        """
        state = self._at(now)
        self._expire()
        lease = state.publisher.lease
        if lease is None or lease.publisher != publisher:
            lease = self.acquire(publisher, now)
            state.publisher.shared = True
        elif renew:
            publisher_session.renew(state, lease.token)
        remaining_s = publisher_session.remaining_s(state)
        round_id = None if state.round is None else state.round.round_id
        self.advance(now)
        return JoinedLease(lease=lease, round_id=round_id, remaining_s=remaining_s)

    def renew(self, token: int, now: float) -> Lease:
        state = self._at(now)
        self._expire()
        return publisher_session.renew(state, token)

    def release(self, token: int, now: float) -> None:
        self.renew(token, now)
        staging_phase.abandon(self.state, "its publisher released the lease")
        self.state.publisher.lease = None
        self.advance(now)

    def connect(self, token: int, init_info: Mapping[str, JsonValue], now: float) -> PendingCall:
        publisher = self.renew(token, now).publisher
        commit_phase.require_no_round(self.state, "connect")
        call = publisher_session.connect(self.state, publisher, init_info)
        self.advance(now)
        return call

    def disconnect(self, token: int, now: float) -> PendingCall:
        self.renew(token, now)
        commit_phase.require_no_round(self.state, "disconnect")
        self.state.publisher.connection = None
        return self.call(Disconnect(), now)

    def open_round(self, token: int, options: RoundOptions, now: float) -> int:
        publisher = self.renew(token, now).publisher
        desired_state.check_awake(self.state)
        round_id = staging_phase.open_round(self.state, publisher, options)
        self.advance(now)
        return round_id

    def send(self, token: int, round_id: int, payload: JsonValue | FilePart, now: float) -> PendingCall:
        self.renew(token, now)
        call = staging_phase.send(self.state, round_id, payload)
        self.advance(now)
        return call

    def close_round(self, token: int, round_id: int, label: str | None, now: float) -> PendingCall:
        """The call's result is a RoundReport. A repeated close is answered from the record."""
        call = commit_phase.closed(self._at(now), round_id, label)
        if call is None:
            self.renew(token, now)
            call = staging_phase.close(self.state, round_id, label)
        self.advance(now)
        return call

    def abort_round(self, token: int, round_id: int, reason: str, now: float) -> None:
        self.renew(token, now)
        current = commit_phase.undecided(self.state, round_id)
        error = RoundAborted(f"round {round_id} aborted by its publisher: {reason}", {"round_id": round_id})
        staging_phase.abort(self.state, current, error)
        self.advance(now)

    def _expire(self) -> None:
        publisher = publisher_session.expire(self.state)
        if publisher is not None:
            staging_phase.abandon(self.state, f"the lease of {publisher!r} expired")

    def join(
        self, replica_id: str, incarnation: str, now: float, unloadable: Unloadable | None = None
    ) -> JoinAnswer:
        """It becomes a member with its first poll."""
        state = self._at(now)
        answer = admission.first_weights(state, replica_id, incarnation, unloadable)
        if unloadable is None or answer.version != unloadable.version:
            state.record("join", replica=replica_id, incarnation=incarnation, version=answer.version)
        return answer

    def stored_version(self, version: int, path: str) -> StoredVersion:
        return admission.stored_version(self.state, version, path)

    def poll(self, report: Report, now: float) -> Directive:
        if self.on_report(report, now):
            self.advance(now)
        return self.directive(report)

    def on_report(self, report: Report, now: float) -> bool:
        """The first half of a poll. Returns whether `advance` is due, at the latest with the next
        tick. Raises FleetUnavailable if a later report overtook this one."""
        return admission.on_report(self._at(now), report)

    def directive(self, report: Report) -> Directive:
        return admission.directive(self.state, report)

    def has_updates(self, report: Report) -> bool:
        return admission.has_updates(self.state, report)

    def is_complete(self) -> bool:
        return not self.state.returning()

    def is_busy(self, report: Report) -> bool:
        return bool((it := self.state.members.get(report.replica_id)) and (it.queue or it.draining))

    def lost(self, processes: Iterable[tuple[str, str]], reason: str, now: float) -> None:
        state = self._at(now)
        for replica_id, incarnation in processes:
            if (member := state.find(replica_id, incarnation)) is not None:
                admission.gone(state, member, reason)
        self.advance(now)

    def silent_since(self, before: float) -> list[tuple[str, str]]:
        members = self.state.members.values()
        return [(each.replica_id, each.incarnation) for each in members if each.last_poll < before]

    def call(self, operation: Operation, now: float) -> PendingCall:
        state = self._at(now)
        if isinstance(operation, Sleep) and operation.level > 0:  # it would discard what is staged
            commit_phase.require_no_round(state, "sleep")
        call = desired_state.call_fleet(state, operation)
        self.advance(now)
        return call

    def set_stored(self, version: int, path: str, label: str | None, now: float) -> None:
        """A version is on disk: joiners may load it. Raises InvalidRequest for one never committed."""
        stored_versions.set_stored(self._at(now), version, path, label)
        self.advance(now)

    def find_stored(self, version: int, path: str, label: str | None, digest: str | None) -> None:
        """Joiners may load it if its committed digest matches."""
        state = self.state
        committed = state.stored_version < version <= state.committed_version
        if committed and state.digest_of(version) in (None, digest):
            self.set_stored(version, path, label, state.now)

    def set_unstored(self, version: int, reason: str, now: float) -> None:
        stored_versions.set_unstored(self._at(now), version, reason)
        self.advance(now)

    def set_scores(self, scores: Scores, now: float) -> None:
        proof.on_scores(self._at(now), scores, None)
        self.advance(now)

    def set_label(self, label: str, now: float) -> None:
        state = self._at(now)
        state.label = label
        state.decide(Labelled(version=state.committed_version, label=label))
        state.record("label", version=state.committed_version, label=label)

    def scale(self, wanted: int | None, now: float) -> responses.SizeStatus:
        state = self._at(now)
        state.size_limits.check(wanted)
        state.desired = DesiredReplicas(wanted=wanted, number=state.desired.number + 1)
        state.decide(Scaled(wanted=wanted, number=state.desired.number))
        state.record("scale", wanted=wanted)
        return _size(state)

    def reconfigure(self, config: LedgerConfig) -> None:
        self.state.config = config

    def begin_adapter(self, load: LoadRequest, now: float) -> Adapter:
        state = self._at(now)
        desired_state.check_awake(state)
        return adapter_loads.begin(state, load)

    def stage_adapter(self, adapter: Adapter, files: AdapterFiles, now: float) -> PendingCall:
        call = adapter_loads.stage(self._at(now), adapter, files)
        self.advance(now)
        return call

    def complete_adapter(self, adapter: Adapter, now: float) -> None:
        adapter_loads.complete(self._at(now), adapter)
        self.advance(now)

    def fail_adapter(self, adapter: Adapter, error: SlipstreamError, now: float) -> None:
        adapter_loads.fail(self._at(now), adapter, error)
        self.advance(now)

    def unload_adapter(self, name: str, now: float) -> PendingCall:
        call = adapter_loads.unload(self._at(now), name)
        self.advance(now)
        return call

    def adapter_settled(self, load_id: str) -> bool:
        return adapter_loads.settled(self.state, load_id)

    def adapter_loaded(self, load_id: str) -> Adapter | None:
        return adapter_loads.loaded(self.state, load_id)

    def adapter_ids(self) -> set[int]:
        return adapter_loads.needed(self.state)

    def adapters(self) -> list[AdapterStatus]:
        return adapter_loads.status(self.state)

    def tick(self, now: float) -> list[str]:
        """Returns the ids of silent replicas, whose processes may exist."""
        silent = membership.check_deadlines(self._at(now))
        proof.check_deadline(self.state)
        self._expire()
        self.advance(now)
        return silent

    def credit(self, stalled_s: float, now: float) -> None:
        state = self._at(now)
        state.credit(stalled_s)
        state.record("stall", stalled_s=round(stalled_s, 3))

    def take_decisions(self) -> list[Decision]:
        """To be durable before any replica polls."""
        taken, self.state.decisions = self.state.decisions, []
        return taken

    def recover(
        self, decisions: Iterable[Decision], now: float, new_fleet_id: str = "fleet", wall: float = 0.0
    ) -> None:
        """Fold an earlier process's decisions, or none, into this new ledger.

        Args:
            new_fleet_id: if they name none.
            wall: `now` + `wall` is seconds since 1970, for reports.
        """
        self.state.wall = wall
        recovery.recover(self._at(now), decisions, new_fleet_id)
        self.advance(now)

    def serve(self, model: str) -> str | None:
        """Returns the model of its versions or adapters, if that is another."""
        state = self.state
        assert state.founded is not None, "a ledger serves after `recover`"
        in_use = state.committed_version or state.adapters.catalog.live
        other = state.founded.model not in (None, model)
        if in_use and other:
            return state.founded.model
        if state.founded.model != model:
            state.found(replace(state.founded, model=model, initial=None if other else state.founded.initial))
        return None

    def history(self, after: int = 0) -> list[RoundReport]:
        return [report for report in self.state.history if report.round_id > after]

    def events_since(self, event_id: int) -> list[responses.Event]:
        newer = takewhile(lambda event: event.event_id > event_id, reversed(self.state.events))
        return list(newer)[::-1]

    def health(self) -> responses.Health:
        members = self.state.members.values()
        serving = sum(each.state is MemberState.SERVING and not each.leaving for each in members)
        return responses.Health(
            status="ok" if serving else "starting",
            serving=serving,
            members=len(members),
            weight_version=self.state.committed_version,
        )

    def status(self, now: float) -> responses.FleetStatus:
        state = self._at(now)
        undecided = state.round is not None and not state.round.decided
        return responses.FleetStatus(
            fleet_id=state.fleet_id,
            committed_version=state.committed_version,
            drafter=state.drafter,
            label=state.label,
            stored_version=None if state.stored is None else state.stored.version,
            initial=None if state.founded is None else state.founded.initial,
            epoch=state.epoch,
            ready=len(state.serving()) >= state.needed,
            min_replicas=state.needed,
            size=_size(state),
            workers=sum(member.world_size for member in state.for_round()),
            members=tuple(_member(member, now) for member in state.members.values()),
            round=_round(state),
            lease=_lease(state),
            connected=None if state.publisher.connection is None else state.publisher.connection.publisher,
            store_problem=stored_versions.problem(state),
            condition=desired_state.names(state),
            # Not counted: a round's id is never used twice, and each commit makes the next version.
            rounds_ended={
                "committed": state.committed_version,
                "aborted": state.last_round_id - state.committed_version - undecided,
            },
        )

    def advance(self, now: float) -> None:
        state, epoch = self._at(now), None
        while epoch != state.epoch:
            epoch = state.epoch
            membership.end_drains(state)
            progress = True
            while progress:
                publisher_session.check_peers(state)
                progress = membership.run_completed(state)
                staging_phase.advance(state)
                progress = commit_phase.advance(state) or progress
            publisher_session.bring_in(state)
            adapter_loads.advance(state)
            admission.advance(state)
            stored_versions.advance_refusals(state)


def _member(member: Member, now: float) -> responses.MemberStatus:
    return responses.MemberStatus(
        replica_id=member.replica_id,
        incarnation=member.incarnation,
        state="leaving" if member.leaving and member.alive else member.state.value,
        admitted=member.state is MemberState.SERVING and not member.leaving,
        version=member.version,
        world_size=member.world_size,
        silent_s=round(now - member.last_poll, 3),
        pending=tuple(queued.body.name for queued in member.queue),
        reason=member.reason,
        draining=member.draining is not None,
        running=None if member.draining is None else member.draining.running,
    )


def _size(state: State) -> responses.SizeStatus:
    alive = [each for each in state.members.values() if each.alive]
    staying = [each for each in alive if not each.leaving]
    running = sum(each.state is MemberState.SERVING for each in staying)
    limits, wanted = state.size_limits, state.desired.wanted
    missing = 0 if wanted is None else wanted - len(staying)
    problem = None
    refused = [each for each in state.refusals.values() if each.version == state.committed_version == 0]
    if refused:
        problem = "; ".join(f"{each.replica_id} is refused: {each.reason}" for each in refused)
    elif missing > 0:
        problem = f"{missing} of {wanted} replicas have not registered yet: they start, or wait for free GPUs"
    return responses.SizeStatus(
        wanted=wanted,
        least=limits.least,
        most=limits.most,
        running=running,
        joining=len(staying) - running,
        leaving=len(alive) - len(staying),
        problem=problem,
    )


def _round(state: State) -> responses.RoundStatus | None:
    current = state.round
    if current is None:
        return None
    return responses.RoundStatus(
        round_id=current.round_id,
        version=current.version,
        label=current.label,
        phase=current.phase.value,
        age_s=round(state.now - current.opened_at, 3),
        participants=tuple(member.replica_id for member in current.participants),
        file_bytes=current.file_bytes,
        sent_bytes=current.sent_bytes,
    )


def _lease(state: State) -> responses.LeaseStatus | None:
    lease = state.publisher.lease
    if lease is None or publisher_session.gives_way(state):
        return None
    left_s = round(publisher_session.remaining_s(state), 3)
    return responses.LeaseStatus(publisher=lease.publisher, remaining_s=left_s)
