"""What can happen to a ledger: replicas join, leave, fail and fall silent; the controller restarts; the
publisher and its users do their calls in any order. A virtual clock, no waits.
`test_ledger_walk` says what must hold.
"""

from contextlib import suppress
from typing import get_args

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deployments.errors import Conflict, SlipstreamError
from deployments.ledger.decisions import Committed, Decision, compact, decode, encode
from deployments.ledger.ledger import Ledger
from deployments.ledger.limits import LedgerConfig
from deployments.protocol.instructions import Body, Call, Commit, CommitMode, Drop
from deployments.protocol.operations import IsPaused, Operation, Pause, Resume, Sleep, SleepTag, WakeUp
from deployments.protocol.publishing import RoundOptions
from deployments.protocol.reports import Outcome
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import STORE

MAX_REPLICAS = 4
HEARTBEAT_S = 10.0
KINDS = st.sampled_from([each for each in get_args(Body) if each not in (Drop, Call)])
OPERATIONS: list[Operation] = [
    *(IsPaused(), Pause(), Resume()),
    *(Sleep(level=level) for level in (0, 1, 2)),
    *(WakeUp(tags=tags) for tags in (None, (SleepTag.WEIGHTS,), (SleepTag.KV_CACHE,))),
]
FAULTS = st.sampled_from([Outcome.REJECTED, Outcome.TRANSFER_FAILED, Outcome.REPLICA_FAILED])


class LedgerMoves(RuleBasedStateMachine):
    commit = CommitMode.TOGETHER

    @initialize(min_replicas=st.integers(1, 2), max_unavailable=st.integers(1, 2))
    def begin(self, min_replicas: int, max_unavailable: int) -> None:
        self.config = LedgerConfig(
            min_replicas=min_replicas,
            max_unavailable=max_unavailable,
            heartbeat_timeout_s=HEARTBEAT_S,
            stage_timeout_s=20,
            commit_timeout_s=15,
            call_timeout_s=15,
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
        self.token = 0
        self.round_id = 0
        self.committed = 0
        self.restarted = False
        self.ledger = Ledger(self.config, STORE)
        self.ledger.recover([], self.now)
        self.persist()
        self.start_replica()

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
        self.born += 1
        replica = FakeReplica(replica_id=f"r{self.born}", incarnation=f"i{self.born}")
        answer = self.ledger.join(replica.replica_id, replica.incarnation, self.now)
        replica.version = answer.version
        self.replicas.append(replica)
        self.poll(replica)

    def poll(self, replica: FakeReplica) -> None:
        directive = self.ledger.poll(replica.report(), self.now)
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
            self.ledger.lost(replica.replica_id, replica.incarnation, "killed", self.now)
            self.persist()

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), kind=KINDS, outcome=FAULTS)
    def break_one(self, data: st.DataObject, kind: type[Body], outcome: Outcome) -> None:
        data.draw(st.sampled_from(self.replicas)).outcomes[kind] = outcome

    @rule(kind=KINDS, outcome=FAULTS)
    def break_all(self, kind: type[Body], outcome: Outcome) -> None:
        for replica in self.replicas:
            replica.outcomes[kind] = outcome

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

    # -- publisher ----------------------------------------------------------------------------

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

    @rule(persist=st.booleans())
    def open_round(self, persist: bool) -> None:
        options = RoundOptions(persist=persist)
        with suppress(SlipstreamError):
            self.round_id = self.ledger.open_round(self.token, options, self.now)
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

    @rule(persist=st.booleans())
    def whole_round(self, persist: bool) -> None:
        """A publisher that does everything right, so that walks reach a commit often."""
        if Sleep.name in self.ledger.status(self.now).condition:
            self.call(WakeUp(tags=(SleepTag.WEIGHTS,)))
            self.poll_all(2)
        self.acquire("trainer")
        self.connect(False)
        self.open_round(persist)
        self.send()
        self.close_round()
        self.poll_all(2)

    @rule()
    def store_committed(self) -> None:
        with suppress(SlipstreamError):
            self.ledger.set_stored(self.ledger.committed_version, "/store", None, self.now)
        self.persist()

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
        self.restarted = True
        if compacted:
            self.journal = compact(self.journal)
        self.ledger = Ledger(self.config, STORE)
        self.ledger.recover(self.journal, self.now)
        self.persist()
