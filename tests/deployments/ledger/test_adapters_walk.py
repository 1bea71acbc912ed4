"""Random walks of loads and unloads; replicas join, fail, hang and die, and the controller restarts."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.ledger.ledger_config import AdapterLimits
from deployments.ledger.state import PendingCall
from deployments.protocol.adapters import DropAdapter, LoadAdapter, SetAdapters
from deployments.protocol.errors import FleetUnavailable, SlipstreamError
from deployments.protocol.poll import Outcome
from tests.deployments.ledger.adapter_scene import FILES, AdapterScene
from tests.deployments.ledger.fake_replica import FakeReplica

NAMES = ("a", "b")
MOVES = st.one_of(
    st.tuples(st.just("load"), st.sampled_from(NAMES)),
    st.tuples(st.just("begin"), st.sampled_from(NAMES)),
    st.tuples(st.just("stage"), st.just("")),
    st.tuples(st.just("sync"), st.booleans()),
    st.tuples(st.just("unload"), st.sampled_from(NAMES)),
    st.tuples(st.just("poll"), st.integers(0, 3)),
    st.tuples(st.just("use"), st.integers(0, 3)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(
        st.just("fail"), st.integers(0, 3), st.sampled_from([Outcome.REJECTED, Outcome.REPLICA_FAILED])
    ),
    st.tuples(st.just("hang"), st.integers(0, 3), st.sampled_from([LoadAdapter, SetAdapters, DropAdapter])),
    st.tuples(st.just("mend"), st.integers(0, 3)),
    st.tuples(st.just("die"), st.integers(0, 3)),
    st.tuples(st.just("start"), st.just("")),
    st.tuples(st.just("restart"), st.just("")),
)


class Walk(AdapterScene):
    """A scene with at most four replicas, and what its clients know."""

    limits = AdapterLimits(keep=2, most=8)

    def __init__(self) -> None:
        super().__init__(2)
        self.calls: list[tuple[PendingCall, str, bool]] = []  # name, and whether it loads
        self.reserved: list[Any] = []
        self.staged: list[Any] = []  # their copies are being synced
        self.durable: set[int] = set()  # ids whose copies are
        self.running: list[tuple[FakeReplica, int, str]] = []
        self.weights: dict[str, int] = {}  # full name -> the one id that it ever had
        self.born = 2

    def make(self, move: tuple[Any, ...]) -> None:
        name, *rest = move
        with suppress(SlipstreamError):  # a refusal
            getattr(self, f"on_{name}")(*rest)
        self.journal += self.ledger.take_decisions()
        self.check()

    def replica(self, index: int) -> FakeReplica | None:
        return self.replicas[index % len(self.replicas)] if self.replicas else None

    def on_load(self, name: str) -> None:
        self.on_begin(name)
        self.on_stage(name)
        self.on_sync(True)

    def on_begin(self, name: str) -> None:
        self.reserved.append(self.ledger.begin_adapter(name, in_place=True, is_3d=False, now=self.now))

    def on_stage(self, _: str) -> None:
        if self.reserved:
            adapter = self.reserved.pop()
            self.calls.append((self.ledger.stage_adapter(adapter, FILES, self.now), adapter.name, True))
            self.staged.append(adapter)
            self.ledger.tick(self.now)

    def on_sync(self, succeeds: bool) -> None:
        if self.staged:
            adapter = self.staged.pop()
            if succeeds:
                self.durable.add(adapter.adapter_id)
                self.ledger.complete_adapter(adapter, self.now)
            else:
                self.ledger.fail_adapter(adapter, FleetUnavailable("the disk is full"), self.now)
            self.ledger.tick(self.now)

    def on_unload(self, name: str) -> None:
        self.calls.append((self.ledger.unload_adapter(name, self.now), name, False))
        self.ledger.tick(self.now)

    def on_poll(self, index: int) -> None:
        replica = self.replica(index)
        if replica is not None:
            self.poll(1, only=[replica])

    def on_use(self, index: int) -> None:
        replica = self.replica(index)
        if replica is not None and replica.admitted and replica.adapters.live:
            full_name = next(iter(replica.adapters.live.values())).full_name
            self.running.append((replica, replica.adapters.begin(full_name), full_name))

    def on_end(self, index: int) -> None:
        if self.running:
            replica, adapter_id, _ = self.running.pop(index % len(self.running))
            replica.adapters.end(adapter_id)

    def on_fail(self, index: int, outcome: Outcome) -> None:
        replica = self.replica(index)
        if replica is not None:
            replica.outcomes[LoadAdapter] = outcome

    def on_hang(self, index: int, kind: type) -> None:
        replica = self.replica(index)
        if replica is not None:
            replica.hangs_in = {kind}

    def on_mend(self, index: int) -> None:
        replica = self.replica(index)
        if replica is not None:
            replica.hangs_in, replica.outcomes = set(), {}

    def on_die(self, index: int) -> None:
        replica = self.replica(index)
        if replica is not None:
            self.replicas.remove(replica)
            self.running = [each for each in self.running if each[0] is not replica]
            self.ledger.lost([(replica.replica_id, replica.incarnation)], "gone", self.now)

    def on_start(self, _: str) -> None:
        if len(self.replicas) < 4:
            name, self.born = f"r{self.born}", self.born + 1
            self.replicas.append(FakeReplica(replica_id=name, incarnation=f"{name}-1"))

    def on_restart(self, _: str) -> None:
        self.restart()
        self.calls, self.reserved, self.staged = [], [], []

    def check(self) -> None:
        adapters = self.ledger.state.adapters
        needed = self.ledger.adapter_ids()
        assert {each.adapter_id for each in adapters.catalog.live} <= self.durable
        for replica in self.replicas:
            for adapter_id, adapter in replica.adapters.live.items():
                assert self.weights.setdefault(adapter.full_name, adapter_id) == adapter_id
                if replica.admitted:
                    assert adapter_id in needed, "the files of an adapter that requests may name can go"
        for replica, adapter_id, full_name in self.running:
            if replica.fenced is None:
                assert adapter_id in needed, f"the files of {full_name} can go under a running request"

    def settle(self) -> None:
        """Nothing fails any more, and all messages arrive."""
        for adapter in self.reserved:
            self.ledger.give_up_adapter(adapter, "its caller left", self.now)
        while self.staged:
            self.on_sync(True)
        for replica in self.replicas:
            replica.hangs_in, replica.outcomes = set(), {}
        for _ in range(40):
            self.poll(1)
        self.wait(self.config.heartbeat_timeout_s + 5)
        self.poll(20)

    def check_end(self) -> None:
        adapters = self.ledger.state.adapters
        serving = [each for each in self.replicas if each.fenced is None]
        for replica in serving:
            assert replica.admitted, "it never serves"
            assert tuple(replica.adapters.live) == tuple(each.adapter_id for each in adapters.catalog.live)
            used = {adapter_id for each, adapter_id, _ in self.running if each is replica}
            assert set(replica.adapters.held) == set(replica.adapters.live) | used
        assert all(call.done for call, _, _ in self.calls), "a caller waits for ever"
        if serving:
            for name in NAMES:  # nothing is left that would refuse it
                call = self.load(name, in_place=True)
                assert call.done and call.error is None, call.error


@pytest.mark.slow
@settings(suppress_health_check=list(HealthCheck))
@given(st.lists(MOVES, max_size=40))
def test_whatever_happens_adapters_are_everywhere_or_nowhere(moves: list[tuple[Any, ...]]) -> None:
    walk = Walk()
    for move in moves:
        walk.make(move)
    walk.settle()
    walk.check()
    walk.check_end()
