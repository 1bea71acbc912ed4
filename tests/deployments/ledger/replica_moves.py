"""What can happen to the replicas of a ledger: they join, leave, fail, hang and take requests."""

from typing import get_args

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from deployments.ledger.decisions import Committed, Decision, decode, encode
from deployments.ledger.ledger import Ledger
from deployments.protocol.ledger_config import LedgerConfig
from deployments.protocol.poll import (
    Body,
    Commit,
    CommitMode,
    Drop,
    JoinAnswer,
    Outcome,
    RunOperation,
)
from tests.deployments.ledger.fake_replica import FakeReplica

MAX_REPLICAS = 4
HEARTBEAT_S = 10.0
KINDS = st.sampled_from([each for each in get_args(Body) if each not in (Drop, RunOperation)])
FAULTS = st.sampled_from([Outcome.REJECTED, Outcome.TRANSFER_FAILED, Outcome.REPLICA_FAILED])


class ReplicaMoves(RuleBasedStateMachine):
    commit = CommitMode.TOGETHER
    make_ledger: type[Ledger] = Ledger

    @initialize(
        min_replicas=st.integers(1, 2),
        max_unavailable=st.integers(1, 2),
        in_place=st.booleans(),
    )
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
        self.ledger = self.make_ledger(self.config)
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
