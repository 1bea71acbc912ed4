"""What can happen to a ledger: replicas join, leave, fail and fall silent; the controller restarts; the
publisher and its users do their calls in any order. A virtual clock, no waits.

`test_ledger_walk` says what must hold.
"""

from contextlib import suppress
from typing import get_args

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deployments.ledger.decisions import Committed, Decision, decode, encode
from deployments.ledger.ledger import Ledger
from deployments.ledger.state import PendingCall
from deployments.protocol.adapters import Adapter, LoadRequest
from deployments.protocol.engine_state import (
    InFlight,
    IsPaused,
    Operation,
    Pause,
    Resume,
    Sleep,
    SleepTag,
    WakeUp,
)
from deployments.protocol.errors import Conflict, FleetUnavailable, SlipstreamError
from deployments.protocol.ledger_config import AdapterLimits, LedgerConfig
from deployments.protocol.poll import (
    Body,
    Commit,
    CommitMode,
    Drop,
    JoinAnswer,
    Outcome,
    Report,
    RunOperation,
)
from deployments.protocol.publishing import RoundOptions
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import FILES

MAX_REPLICAS = 4
HEARTBEAT_S = 10.0
KINDS = st.sampled_from([each for each in get_args(Body) if each not in (Drop, RunOperation)])
FAULTS = st.sampled_from([Outcome.REJECTED, Outcome.TRANSFER_FAILED, Outcome.REPLICA_FAILED])


class ReplicaMoves(RuleBasedStateMachine):
    commit = CommitMode.TOGETHER
    make_ledger: type[Ledger] = Ledger

    @initialize(min_replicas=st.integers(1, 2), max_unavailable=st.integers(1, 2), in_place=st.booleans())
    def begin(self, min_replicas: int, max_unavailable: int, in_place: bool) -> None:
        self.in_place = in_place
        self.config = LedgerConfig(
            min_replicas=min_replicas,
            max_unavailable=max_unavailable,
            heartbeat_timeout_s=HEARTBEAT_S,
            stage_timeout_s=20,
            commit_timeout_s=15,
            call_timeout_s=15,
            drain_timeout_s=12,
            grace_s=1,
            lease_s=40,
            commit=self.commit,
        )
        self.now = 0.0
        self.journal: list[Decision] = []
        self.replicas: list[FakeReplica] = []
        self.contact: dict[str, float] = {}  # incarnation -> its last poll
        self.forbidden: set[str] = set()  # incarnations whose fence was delivered
        self.born = 0
        self.starting: list[tuple[FakeReplica, JoinAnswer]] = []  # their engines are not up yet
        self.token = 0
        self.round_id = 0
        self.committed = 0
        self.reports: dict[str, Report] = {}  # incarnation -> its last one
        self.calls: list[tuple[str, Adapter | None, PendingCall]] = []  # loads, and unloads without one
        self.promised = {"m": 0, "n": 0}  # by name, the version that a caller was told is live
        self.failed: set[int] = set()  # ids that a caller was told are not
        self.unloaded: set[str] = set()  # names, as a caller was told
        self.start_ledger()
        self.start_replica()

    def start_ledger(self) -> None:
        self.ledger = self.make_ledger(self.config, adapters=AdapterLimits(keep=1))
        self.ledger.recover(self.journal, self.now)
        self.persist()

    def persist(self) -> None:
        self.journal += [decode(encode(decision)) for decision in self.ledger.take_decisions()]

    def serving(self) -> list[FakeReplica]:
        """Those that would take a request now: a replica out of contact stops by itself."""
        return [
            each
            for each in self.replicas
            if each.admitted and not each.held and self.now - self.contact[each.incarnation] <= HEARTBEAT_S
        ]

    # -- replicas -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.replicas) < MAX_REPLICAS)
    @rule()
    def start_replica(self) -> None:
        self.begin_start()
        self.end_start()

    @precondition(lambda self: len(self.replicas) + len(self.starting) < MAX_REPLICAS)
    @rule()
    def begin_start(self) -> None:
        """Its engine takes long."""
        self.born += 1
        replica = FakeReplica(
            replica_id=f"r{self.born}", incarnation=f"i{self.born}", updates_in_place=self.in_place
        )
        answer = self.ledger.join(replica.replica_id, replica.incarnation, self.now)
        self.persist()
        self.starting.append((replica, answer))

    @precondition(lambda self: self.starting)
    @rule()
    def end_start(self) -> None:
        replica, answer = self.starting.pop()
        replica.version = answer.version
        self.replicas.append(replica)
        self.poll(replica)

    def poll(self, replica: FakeReplica) -> None:
        report = self.reports[replica.incarnation] = replica.report()
        directive = self.ledger.poll(report, self.now)
        self.persist()
        self.contact[replica.incarnation] = self.now
        self.check_no_early_commit(replica, [type(each.body) for each in directive.instructions])
        replica.take(directive)
        if replica.fenced is not None:
            self.forbidden.add(replica.incarnation)
        assert not (replica.admitted and replica.incarnation in self.forbidden), "admitted after a fence"

    def check_no_early_commit(self, replica: FakeReplica, kinds: list[type[Body]]) -> None:
        if Commit in kinds:
            decided = [each for each in self.journal if isinstance(each, Committed)]
            assert decided, "COMMIT was ordered before the decision was durable"
            assert replica.version in (decided[-1].version - 1, decided[-1].version) or not replica.admitted

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def poll_one(self, data: st.DataObject) -> None:
        self.poll(data.draw(st.sampled_from(self.replicas)))

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def lose_answer(self, data: st.DataObject) -> None:
        self.ledger.poll(data.draw(st.sampled_from(self.replicas)).report(), self.now)
        self.persist()

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def repeat_report(self, data: st.DataObject) -> None:
        """Nobody waits for its answer."""
        replica = data.draw(st.sampled_from(self.replicas))
        with suppress(FleetUnavailable):
            self.ledger.poll(self.reports[replica.incarnation], self.now)
        self.persist()

    @rule(times=st.integers(1, 3))
    def poll_all(self, times: int) -> None:
        for _ in range(times):
            for replica in self.replicas:
                self.poll(replica)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), noticed=st.booleans())
    def kill(self, data: st.DataObject, noticed: bool) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        self.replicas.remove(replica)
        if noticed:
            self.ledger.lost([(replica.replica_id, replica.incarnation)], "killed", self.now)
            self.persist()

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), kind=KINDS, outcome=FAULTS)
    def break_one(self, data: st.DataObject, kind: type[Body], outcome: Outcome) -> None:
        data.draw(st.sampled_from(self.replicas)).outcomes[kind] = outcome

    @rule(kind=KINDS, outcome=FAULTS)
    def break_all(self, kind: type[Body], outcome: Outcome) -> None:
        for replica in self.replicas:
            replica.outcomes[kind] = outcome

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), count=st.integers(1, 3))
    def take_requests(self, data: st.DataObject, count: int) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        if replica.admitted:
            replica.take_requests(count)

    @rule()
    def end_requests(self) -> None:
        for replica in self.replicas:
            replica.end_requests()

    @rule()
    def mend_all(self) -> None:
        for replica in self.replicas:
            replica.outcomes.clear()
            replica.hangs_in.clear()

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), kind=KINDS)
    def hang(self, data: st.DataObject, kind: type[Body]) -> None:
        data.draw(st.sampled_from(self.replicas)).hangs_in.add(kind)

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), digest=st.sampled_from(["aa", "bb"]))
    def corrupt(self, data: st.DataObject, digest: str) -> None:
        data.draw(st.sampled_from(self.replicas)).digest = digest


OPERATIONS: list[Operation] = [
    *(IsPaused(), Pause(), Resume(), Pause(mode=InFlight.WAIT)),
    *(Sleep(level=level) for level in (0, 1, 2)),
    Sleep(level=1, mode=InFlight.WAIT),
    *(WakeUp(tags=tags) for tags in (None, (SleepTag.WEIGHTS,), (SleepTag.KV_CACHE,))),
]
IN_FLIGHT = st.sampled_from([InFlight.KEEP, InFlight.WAIT, InFlight.ABORT])


class LedgerMoves(ReplicaMoves):
    """The publisher, the users, and time."""

    @rule(publisher=st.sampled_from(["trainer", "trainer", "other"]))
    def acquire(self, publisher: str) -> None:
        with suppress(SlipstreamError):
            token = self.ledger.acquire(publisher, self.now).token
            assert token > self.token, "fencing tokens must grow"
            self.token = token
        self.persist()

    @rule(collective=st.booleans())
    def connect(self, collective: bool) -> None:
        with suppress(SlipstreamError):
            self.ledger.connect(self.token, {"rank_offset": 1} if collective else {}, self.now)
        self.persist()

    @rule(persist=st.booleans(), in_flight=IN_FLIGHT)
    def open_round(self, persist: bool, in_flight: InFlight = InFlight.KEEP) -> None:
        self.ledger.reconfigure(self.config.model_copy(update={"in_flight": in_flight}))
        with suppress(SlipstreamError):
            self.round_id = self.ledger.open_round(self.token, RoundOptions(persist=persist), self.now)
        self.persist()

    @rule()
    def send(self) -> None:
        with suppress(SlipstreamError):
            self.ledger.send(self.token, self.round_id, {"segment": "s"}, self.now)
        self.persist()

    @rule()
    def close_round(self) -> None:
        with suppress(SlipstreamError):
            self.ledger.close_round(self.token, self.round_id, None, self.now)
        self.persist()

    @rule()
    def abort_round(self) -> None:
        with suppress(SlipstreamError):
            self.ledger.abort_round(self.token, self.round_id, "no", self.now)
        self.persist()

    @rule(persist=st.booleans(), in_flight=IN_FLIGHT)
    def whole_round(self, persist: bool, in_flight: InFlight = InFlight.KEEP) -> None:
        """A publisher that does everything right, so that walks reach a commit often."""
        if "sleep" in self.ledger.status(self.now).condition:
            self.call(WakeUp(tags=(SleepTag.WEIGHTS,)))
            self.poll_all(2)
        self.acquire("trainer")
        self.connect(False)
        self.open_round(persist, in_flight)
        self.send()
        self.close_round()
        self.poll_all(2)

    @rule()
    def store_committed(self) -> None:
        with suppress(SlipstreamError):
            self.ledger.set_stored(self.ledger.state.committed_version, "/store", None, self.now)
        self.persist()

    @rule(times=st.integers(1, 3))
    def stored_rounds(self, times: int) -> None:
        """As a trainer does; what joiners load is old soon."""
        for _ in range(times):
            self.whole_round(False)
            self.store_committed()

    @rule(operation=st.sampled_from(OPERATIONS))
    def call(self, operation: Operation) -> None:
        with suppress(Conflict):
            self.ledger.call(operation, self.now)
        self.persist()

    @rule(ends=st.booleans())
    def update_asleep(self, ends: bool) -> None:
        """What frees the most memory for a trainer's step; with an end that is not always allowed."""
        self.call(Sleep(level=2))
        self.poll_all(2)
        self.whole_round(True)
        if ends:
            self.call(WakeUp())

    # -- adapters -----------------------------------------------------------------------------

    @rule(name=st.sampled_from("mn"))
    def load_adapter(self, name: str) -> None:
        with suppress(SlipstreamError):
            request = LoadRequest(name=name, path="/a", in_place=True)
            adapter = self.ledger.begin_adapter(request, self.now)
            self.unloaded.discard(name)
            self.calls.append((name, adapter, self.ledger.stage_adapter(adapter, FILES, self.now)))
            self.ledger.complete_adapter(adapter, self.now)
            self.ledger.tick(self.now)
        self.persist()

    @rule(name=st.sampled_from("mn"))
    def unload_adapter(self, name: str) -> None:
        with suppress(SlipstreamError):
            self.calls.append((name, None, self.ledger.unload_adapter(name, self.now)))
            self.promised[name] = 0
            self.ledger.tick(self.now)
        self.persist()

    @invariant()
    def hear_of_adapters(self) -> None:
        for name, adapter, call in [each for each in self.calls if each[2].done]:
            self.calls.remove((name, adapter, call))
            if adapter is not None and call.error is None:
                self.promised[name] = adapter.version
            elif adapter is not None:
                self.failed.add(adapter.adapter_id)
            elif not any(each[0] == name for each in self.calls) and not self.promised[name]:
                self.unloaded.add(name)

    # -- time and restarts --------------------------------------------------------------------

    @rule(elapsed_s=st.sampled_from([0.1, 1.0, 5.0, 9.0, 30.0]))
    def pass_time(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        self.ledger.tick(self.now)
        self.persist()

    @rule(stalled_s=st.sampled_from([3.0, 60.0]))
    def stand_still(self, stalled_s: float) -> None:
        """Nothing ran in the controller meanwhile; replicas out of contact stop by themselves."""
        self.now += stalled_s
        self.ledger.credit(stalled_s, self.now)
        self.persist()

    @rule(compacted=st.booleans())
    def restart(self, compacted: bool) -> None:
        if compacted:
            self.journal = compact(self.journal)
        self.calls.clear()
        self.start_ledger()
