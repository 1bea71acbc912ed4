"""A small fleet as a graph: from each state all that can happen next, message by message, and what must hold.

A move is one message that arrives, one step of the publisher, or a fault. A state is reached by its moves: it
is made anew from them, because a ledger cannot be copied. Two ways to the same state are followed once.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from deployments.ledger.decisions import Committed, Decision
from deployments.ledger.ledger import Ledger
from deployments.ledger.ledger_config import LedgerConfig
from deployments.ledger.state import PendingCall
from deployments.protocol.errors import FleetUnavailable, SlipstreamError
from deployments.protocol.poll import Body, Commit, Directive, Outcome, Receive, Release, Report, Verify
from deployments.protocol.publishing import RoundOptions
from tests.deployments.ledger.fake_replica import FakeReplica

Move = tuple[Any, ...]
FAILING: tuple[type[Body], ...] = (Receive, Verify, Commit, Release)
OUTCOMES = (Outcome.REPLICA_FAILED, Outcome.TRANSFER_FAILED, Outcome.REJECTED)


@dataclass(slots=True)
class Seat:
    """One replica, and its messages under way."""

    replica: FakeReplica
    alive: bool = True
    answer: Directive | None = None  # on its way to it
    last: Report | None = None  # that arrived last


@dataclass(slots=True)
class SmallFleet:
    """A ledger with replicas, a publisher that runs rounds, and a number of faults that may still happen."""

    count: int
    rounds: int
    faults: int
    now: float = 100.0
    journal: list[Decision] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)
    token: int = 0
    round_id: int = 0
    step: str = "open"  # of the publisher: open, send, close, wait, or end
    done: int = 0  # rounds that it has ended, in whatever way
    call: PendingCall | None = None
    ledger: Ledger = field(default_factory=Ledger)
    config: LedgerConfig = field(default_factory=LedgerConfig)

    def __post_init__(self) -> None:
        self.restart()
        for index in range(self.count):
            self.seats.append(Seat(FakeReplica(replica_id=f"r{index}", incarnation=f"r{index}-1")))
        self.settle()
        self.begin()

    # -- moves --------------------------------------------------------------------------------

    def moves(self) -> Iterator[Move]:
        """All that can happen now."""
        for index, seat in enumerate(self.seats):
            if seat.alive:
                yield ("poll", index) if seat.answer is None else ("take", index)
        if self.step != "end" and (self.call is None or self.call.done):
            yield ("publish",)
        if not self.faults:
            return
        for index, seat in enumerate(self.seats):
            if not seat.alive:
                continue
            yield ("die", index)
            if seat.answer is not None:
                yield ("lose", index)
                for kind in {type(each.body) for each in seat.answer.instructions} & {*FAILING}:
                    yield from (("fail", index, kind.name, outcome.value) for outcome in OUTCOMES)
            if seat.last is not None and seat.answer is None:
                yield ("repeat", index)
        yield ("restart",)
        if self.step != "end":
            yield ("forsake",)

    def make(self, move: Move) -> None:
        """Let it happen, and check what must hold."""
        name, *rest = move
        if name not in ("poll", "take", "publish"):
            self.faults -= 1
        getattr(self, name)(*rest)
        self.check()

    def poll(self, index: int) -> None:
        seat = self.seats[index]
        seat.last = seat.replica.report()
        seat.answer = self.ledger.poll(seat.last, self.now)
        self.persist()

    def take(self, index: int) -> None:
        seat = self.seats[index]
        assert seat.answer is not None
        seat.replica.take(seat.answer)
        seat.answer = None

    def lose(self, index: int) -> None:
        """The answer to a poll."""
        self.seats[index].answer = None

    def repeat(self, index: int) -> None:
        """A report that arrives once more, when nobody waits for its answer."""
        report = self.seats[index].last
        assert report is not None
        with suppress(FleetUnavailable):
            self.ledger.poll(report, self.now)
        self.persist()

    def fail(self, index: int, kind: str, outcome: str) -> None:
        """One of the instructions that it is about to run."""
        seat = self.seats[index]
        body = next(each for each in FAILING if each.name == kind)
        seat.replica.outcomes[body] = Outcome(outcome)
        self.take(index)
        seat.replica.outcomes.clear()

    def die(self, index: int) -> None:
        """Its process is gone, and the controller is told."""
        seat = self.seats[index]
        seat.alive, seat.answer = False, None
        self.ledger.lost([(seat.replica.replica_id, seat.replica.incarnation)], "gone", self.now)
        self.persist()

    def restart(self) -> None:
        """The controller; calls that wait for it fail."""
        self.ledger = Ledger(self.config)
        self.ledger.recover(self.journal, self.now)
        self.persist()
        for seat in self.seats:
            seat.answer = None
        for seat in self.seats:
            if not seat.alive:  # the new one looks its process up
                self.ledger.lost([(seat.replica.replica_id, seat.replica.incarnation)], "gone", self.now)
        self.persist()
        if self.call is not None:
            self.call, self.step = None, "end"

    def forsake(self) -> None:
        """The publisher dies; its lease ends."""
        self.step, self.call = "end", None
        self.ledger.release(self.token, self.now) if self._holds() else None
        self.persist()

    def publish(self) -> None:
        """The publisher's next call."""
        try:
            if self.call is not None and self.call.error is not None:
                raise self.call.error
            match self.step:
                case "open":
                    self.round_id = self.ledger.open_round(self.token, RoundOptions(), self.now)
                    self.call, self.step = None, "send"
                case "send":
                    self.call = self.ledger.send(self.token, self.round_id, {}, self.now)
                    self.step = "close"
                case "close":
                    self.call = self.ledger.close_round(self.token, self.round_id, None, self.now)
                    self.step = "wait"
                case "wait":
                    self.call = None
                    self._next_round()
        except SlipstreamError:
            self.call = None
            self._next_round()
        self.persist()

    def _next_round(self) -> None:
        self.done += 1
        self.step = "open" if self.done < self.rounds else "end"

    def _holds(self) -> bool:
        try:
            self.ledger.renew(self.token, self.now)
        except SlipstreamError:
            return False
        return True

    def persist(self) -> None:
        self.journal += self.ledger.take_decisions()

    # -- to the start, and to the end ---------------------------------------------------------

    def begin(self) -> None:
        """A publisher that is connected."""
        self.token = self.ledger.acquire("trainer", self.now).token
        self.ledger.connect(self.token, {}, self.now)
        self.settle()

    def settle(self) -> None:
        """Every message arrives, until nothing changes any more."""
        quiet = 0
        while quiet < 2:
            quiet += 1
            for index, seat in enumerate(self.seats):
                if seat.alive:
                    before = (len(seat.replica.ran), seat.replica.admitted, seat.replica.fenced)
                    if seat.answer is None:
                        self.poll(index)
                    self.take(index)
                    after = (len(seat.replica.ran), seat.replica.admitted, seat.replica.fenced)
                    quiet = quiet if before == after and not seat.replica.acknowledgements else 0
        self.check()

    # -- what must hold -----------------------------------------------------------------------

    def serving(self) -> list[FakeReplica]:
        return [
            each.replica
            for each in self.seats
            if each.alive and each.replica.admitted and not each.replica.held
        ]

    def seen_by_users(self) -> list[tuple[str, int]]:
        """Which replicas would answer, from which version."""
        return [(each.replica_id, each.version) for each in self.serving()]

    def check(self) -> None:
        committed = max((each.version for each in self.journal if isinstance(each, Committed)), default=0)
        versions = {each.version for each in self.serving()}
        assert len(versions) <= 1, f"served at once: {versions}"
        assert all(version <= committed for version in versions), f"{versions}, the disk says {committed}"
        assert self.ledger.state.committed_version == committed

    def check_end(self) -> None:
        """With messages that arrive every round ends, and who is not fenced serves its version."""
        for _ in range(5 * self.rounds):
            self.settle()
            if self.step != "end":
                assert self.call is None or self.call.done, "a publisher waits for ever"
                self.publish()
        self.settle()
        assert self.ledger.status(self.now).round is None, "a round does not end"
        committed = self.ledger.state.committed_version
        for seat in self.seats:
            replica = seat.replica
            if seat.alive and replica.fenced is None:
                assert replica.version == committed or not replica.admitted
                assert not replica.held, f"{replica.replica_id} is held for ever"
        assert self.step == "end"
