"""Random walks over the ledger: whatever happens, in any order, these things hold.

What the fake replicas *believe* (admitted, not held, in contact) is what users would see, so the
invariants are checked on that and not on what the ledger thinks.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from deployments.ledger.decisions import Cataloged, Committed, Ended
from deployments.ledger.ledger import Ledger
from deployments.protocol.engine_state import equivalent
from deployments.protocol.poll import CommitMode, Directive, Report
from tests.deployments.ledger.ledger_moves import LedgerMoves


class LateLedger(Ledger):
    """Every other time something follows from a report, it does so after a later one, or with a tick."""

    late = False

    def poll(self, report: Report, now: float) -> Directive:
        if self.on_report(report, now):
            self.late = not self.late
            if not self.late:
                self.advance(now)
        return self.directive(report)


class CheckedLedger(Ledger):
    """Checks what `Ledger.on_report` returns."""

    def on_report(self, report: Report, now: float) -> bool:
        self.advance(now)  # what time alone makes possible, which the next tick would find
        follows = super().on_report(report, now)
        if not follows:
            before = self._visible()
            self.advance(now)
            assert self._visible() == before, f"something followed from {report}"
        return follows

    def _visible(self) -> object:
        """What anybody outside can notice of its state, and everything that it is about to do."""
        state = self.state
        members = [
            (each.replica_id, each.state, each.engine_state, [it.instruction.seq for it in each.queue])
            for each in state.members.values()
        ]
        current = state.round
        phase = None if current is None else (current.round_id, current.phase)
        events = [each.event_id for each in self.events_since(0)][-1:]
        engine_state, adapters = state.engine_state, self.adapters()
        return members, state.epoch, state.committed_version, phase, events, engine_state, adapters


class Walk(LedgerMoves):
    @invariant()
    def nobody_admitted_computes_with_discarded_weights(self) -> None:
        assert not [each.replica_id for each in self.replicas if each.admitted and each.memory.computes_noise]

    @invariant()
    def the_committed_version_never_goes_back(self) -> None:
        assert self.ledger.state.committed_version >= self.committed
        self.committed = self.ledger.state.committed_version

    @invariant()
    def together_means_one_version_at_a_time(self) -> None:
        if self.commit is CommitMode.TOGETHER:
            versions = {each.version for each in self.serving()}
            assert len(versions) <= 1, f"served at once: {versions}"

    @invariant()
    def nobody_admitted_serves_an_uncommitted_version(self) -> None:
        for replica in self.replicas:
            if replica.admitted:
                assert replica.version <= self.ledger.state.committed_version

    @invariant()
    def outside_a_commit_all_in_contact_serve_the_committed_version(self) -> None:
        status = self.ledger.status(self.now)
        if status.round is None or status.round.phase in ("open", "verifying", "verified", "draining"):
            for member in status.members:
                if member.admitted:
                    assert member.version == status.committed_version

    @invariant()
    def adapters_are_durable_and_as_callers_were_told(self) -> None:
        catalogs = [each.catalog for each in self.journal if isinstance(each, Cataloged)]
        durable = {adapter.adapter_id for catalog in catalogs for adapter in catalog.live}
        followed = {each.incarnation for each in self.ledger.state.live()}
        for replica in self.serving():
            live = replica.adapters.live
            assert live.keys() <= durable, "requests may name what the disk does not"
            # One that is fenced may hold it until it learns so, and no request names it there.
            held = replica.adapters.held if replica.incarnation in followed else live
            assert not self.failed & held.keys(), "its caller was told that it failed"
            for name, promised in self.promised.items():
                own = [each.version for each in live.values() if each.name == name]
                assert max(own, default=0) >= promised, f"{replica.replica_id} lacks what was promised"
                assert not (own and name in self.unloaded), "its caller was told that it is unloaded"

    def teardown(self) -> None:
        """Left alone, with replicas that go on polling, every round ends."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(40):
            self.pass_time(4.0)
            self.poll_all(1)
            self.together_means_one_version_at_a_time()
        assert self.ledger.status(self.now).round is None, "a round never ended"
        live = [each.adapter_id for each in self.ledger.state.adapters.catalog.live]
        assert all(call.done for *_, call in self.calls), "the caller of an adapter waits for ever"
        if not any(each.fenced or not each.admitted for each in self.replicas):
            assert self.ledger.adapter_ids() == {*live}, "files stay for ever"
        decided = [each.round_id for each in self.journal if isinstance(each, Committed)]
        ended = [each.report for each in self.journal if isinstance(each, Ended)]
        committed = [each.round_id for each in ended if each.phase == "committed"]
        assert decided[-1:] == committed[-1:]
        for replica in self.serving():
            assert replica.version == self.ledger.state.committed_version
            assert not replica.drains, "it begins no request, for nobody"
            assert [*replica.adapters.live] == [*replica.adapters.held] == live
        status = self.ledger.status(self.now)
        for replica in self.serving():
            assert equivalent(replica.condition, self.ledger.state.engine_state)
        if decided and self.to_be_stored():
            stored = status.stored_version == status.committed_version
            assert stored or status.store_problem is not None, "neither stored nor said to be lost"

    def to_be_stored(self) -> bool:
        return [each.persist for each in self.journal if isinstance(each, Committed)][-1]


class RollingWalk(Walk):
    commit = CommitMode.ROLLING


class CheckedWalk(Walk):
    """As the others; and from a report that is said to lead to nothing, nothing follows."""

    make_ledger = CheckedLedger


class CheckedRollingWalk(CheckedWalk):
    commit = CommitMode.ROLLING


class LateWalk(Walk):
    make_ledger = LateLedger


class LateRollingWalk(LateWalk):
    commit = CommitMode.ROLLING


SEARCH = not settings().derandomize  # in `make test-all`; else a few, which are always the same
WALK = settings(
    max_examples=2 * settings().max_examples if SEARCH else 40,
    stateful_step_count=50 if SEARCH else 30,
    suppress_health_check=list(HealthCheck),
)
TestTogether = pytest.mark.slow(Walk.TestCase)
TestTogether.settings = WALK
TestRolling = pytest.mark.slow(RollingWalk.TestCase)
TestRolling.settings = WALK
TestNothingFollows = pytest.mark.slow(CheckedWalk.TestCase)
TestNothingFollows.settings = WALK
TestNothingFollowsRolling = pytest.mark.long(CheckedRollingWalk.TestCase)
TestNothingFollowsRolling.settings = WALK
TestLate = pytest.mark.slow(LateWalk.TestCase)
TestLate.settings = WALK
TestLateRolling = pytest.mark.long(LateRollingWalk.TestCase)
TestLateRolling.settings = WALK
