"""Random walks over the ledger: replicas join, leave, fail and fall silent; the controller restarts; the
publisher does its calls in any order. A virtual clock, no waits.

What the fake replicas *believe* (admitted, not held, in contact) is what users would see, so the
invariants are checked on that and not on what the ledger thinks.
"""

from contextlib import suppress

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deployments.errors import SlipstreamError
from deployments.weights.decisions import Committed, Decision, Finished, compact, decode, encode
from deployments.weights.ledger import Ledger
from deployments.weights.ledger_config import LedgerConfig
from deployments.weights.protocol import (
    CommitMode,
    FleetOperation,
    InstructionKind,
    Outcome,
    RoundOptions,
)
from tests.deployments.weights.fake_replica import FakeReplica
from tests.deployments.weights.ledger_scene import STORE

MAX_REPLICAS = 4
HEARTBEAT_S = 10.0
KINDS = st.sampled_from(
    [each for each in InstructionKind if each not in (InstructionKind.DROP, InstructionKind.CALL)]
)
OPERATIONS = [
    *(FleetOperation.IS_PAUSED, FleetOperation.PAUSE, FleetOperation.RESUME),
    *(FleetOperation.SLEEP, FleetOperation.WAKE_UP),
]
FAULTS = st.sampled_from([Outcome.REJECTED, Outcome.FAILED])


class Walk(RuleBasedStateMachine):
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
        self.forbidden: set[str] = set()  # incarnations that were told a fence
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
        self.check_no_early_commit(replica, [each.kind for each in directive.instructions])
        replica.take(directive)
        if replica.fenced is not None:
            self.forbidden.add(replica.incarnation)
        assert not (replica.admitted and replica.incarnation in self.forbidden), "admitted after a fence"

    def check_no_early_commit(self, replica: FakeReplica, kinds: list[InstructionKind]) -> None:
        if InstructionKind.COMMIT in kinds:
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
    def break_one(self, data: st.DataObject, kind: InstructionKind, outcome: Outcome) -> None:
        data.draw(st.sampled_from(self.replicas)).outcomes[kind] = outcome

    @rule(kind=KINDS, outcome=FAULTS)
    def break_all(self, kind: InstructionKind, outcome: Outcome) -> None:
        for replica in self.replicas:
            replica.outcomes[kind] = outcome

    @rule()
    def mend_all(self) -> None:
        for replica in self.replicas:
            replica.outcomes.clear()
            replica.mute.clear()

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), kind=KINDS)
    def hang(self, data: st.DataObject, kind: InstructionKind) -> None:
        data.draw(st.sampled_from(self.replicas)).mute.add(kind)

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
            self.round_id = self.ledger.open_round(self.token, None, options, self.now).result
        self.persist()

    @rule()
    def send(self) -> None:
        with suppress(SlipstreamError):
            self.ledger.send(self.token, self.round_id, {"segment": "s"}, self.now)
        self.persist()

    @rule()
    def close_round(self) -> None:
        with suppress(SlipstreamError):
            self.ledger.close_round(self.token, self.round_id, None, None, self.now)
        self.persist()

    @rule()
    def abort_round(self) -> None:
        with suppress(SlipstreamError):
            self.ledger.abort_round(self.token, self.round_id, "no", self.now)
        self.persist()

    @rule(persist=st.booleans())
    def whole_round(self, persist: bool) -> None:
        """A publisher that does everything right, so that walks reach a commit often."""
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
    def call(self, operation: FleetOperation) -> None:
        # Level 0: else no round could open until it is woken.
        self.ledger.call(operation, {"level": 0} if operation is FleetOperation.SLEEP else {}, self.now)
        self.persist()

    # -- time and restarts --------------------------------------------------------------------

    @rule(elapsed_s=st.sampled_from([0.1, 1.0, 5.0, 9.0, 30.0]))
    def pass_time(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        self.ledger.tick(self.now)
        self.persist()

    @rule(compacted=st.booleans())
    def restart(self, compacted: bool) -> None:
        self.restarted = True
        if compacted:
            self.journal = compact(self.journal)
        self.ledger = Ledger(self.config, STORE)
        self.ledger.recover(self.journal, self.now)
        self.persist()

    # -- what must always hold ----------------------------------------------------------------

    @invariant()
    def the_committed_version_never_goes_back(self) -> None:
        assert self.ledger.committed_version >= self.committed
        self.committed = self.ledger.committed_version

    @invariant()
    def together_means_one_version_at_a_time(self) -> None:
        if self.commit is CommitMode.TOGETHER:
            versions = {each.version for each in self.serving()}
            assert len(versions) <= 1, f"served at once: {versions}"

    @invariant()
    def nobody_admitted_serves_an_uncommitted_version(self) -> None:
        for replica in self.replicas:
            if replica.admitted:
                assert replica.version <= self.ledger.committed_version

    @invariant()
    def outside_a_commit_all_in_contact_serve_the_committed_version(self) -> None:
        status = self.ledger.status(self.now)
        if status["round"] is None or status["round"]["phase"] in ("open", "verifying", "verified"):
            for member in status["members"]:
                if member["admitted"]:
                    assert member["version"] == status["committed_version"]

    def teardown(self) -> None:
        """Left alone, with replicas that go on polling, every round ends."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(40):
            self.pass_time(4.0)
            self.poll_all(1)
            self.together_means_one_version_at_a_time()
        assert self.ledger.status(self.now)["round"] is None, "a round never ended"
        decided = [each.round_id for each in self.journal if isinstance(each, Committed)]
        finished = [each.round_id for each in self.journal if isinstance(each, Finished)]
        assert decided[-1:] == finished[-1:]
        for replica in self.serving():
            assert replica.version == self.ledger.committed_version
        status = self.ledger.status(self.now)
        if not self.restarted:  # else some may have done what the last controller could not note
            for replica in self.serving():
                assert [each.operation for each in replica.condition] == status["condition"]
        if decided and self.to_be_stored():
            stored = status["stored_version"] == status["committed_version"]
            assert stored != (status["store_problem"] is not None), "neither stored nor said to be lost"

    def to_be_stored(self) -> bool:
        return [each.persist for each in self.journal if isinstance(each, Committed)][-1]


class RollingWalk(Walk):
    commit = CommitMode.ROLLING


WALK = settings(
    max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTogether = Walk.TestCase
TestTogether.settings = WALK
TestRolling = RollingWalk.TestCase
TestRolling.settings = WALK
