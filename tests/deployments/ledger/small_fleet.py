"""A small fleet, message by message: what can happen next, and what must hold.

A move is one message that arrives, one step of the publisher or of a user of adapters, or a fault.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from deployments.ledger.decisions import Cataloged, Committed, Decision
from deployments.ledger.ledger import Ledger
from deployments.ledger.state import PendingCall
from deployments.protocol.adapters import Adapter, AdapterFiles, LoadAdapter, LoadRequest, SetAdapters
from deployments.protocol.errors import FleetUnavailable, SlipstreamError
from deployments.protocol.ledger_config import AdapterLimits, LedgerConfig
from deployments.protocol.poll import Body, Commit, Directive, Outcome, Receive, Release, Report, Verify
from deployments.protocol.publishing import RoundOptions
from tests.deployments.ledger.fake_replica import FakeReplica

Move = tuple[Any, ...]
CALM = ("poll", "take", "publish", "use_adapters")  # moves that are no fault
FAILING: tuple[type[Body], ...] = (Receive, Verify, Commit, Release, LoadAdapter, SetAdapters)
ONE_VERSION = AdapterLimits(keep=1)
FILES = AdapterFiles(path="/a", digest="d", size_bytes=1)
OUTCOMES = (Outcome.REPLICA_FAILED, Outcome.TRANSFER_FAILED, Outcome.REJECTED)


@dataclass(slots=True)
class Seat:
    """One replica, and its messages under way."""

    replica: FakeReplica
    alive: bool = True
    answer: Directive | None = None  # on its way to it
    last: Report | None = None  # that arrived last


@dataclass(slots=True)
class AdapterUser:
    """Loads one name so many times, and unloads it."""

    name: str
    loads: int
    step: str = "load"  # load, complete, wait, unload, unloaded, or end
    adapter: Adapter | None = None  # the last one
    call: PendingCall | None = None
    promised: int = 0  # the newest version that it was told is live
    failed: set[int] = field(default_factory=set)  # ids that it was told are not
    unloaded: bool = False  # as it was told

    def go_on(self, ledger: Ledger, now: float) -> None:
        """Its next call, or the answer to the last one."""
        match self.step:
            case "load":
                self.adapter = ledger.begin_adapter(
                    LoadRequest(name=self.name, path="/a", in_place=True), now
                )
                self.call, self.step = ledger.stage_adapter(self.adapter, FILES, now), "complete"
                self.loads -= 1
            case "complete":
                assert self.adapter is not None
                ledger.complete_adapter(self.adapter, now)
                self.step = "wait"
            case "wait":
                assert self.adapter is not None and self.call is not None
                if self.call.error is None:
                    self.promised = self.adapter.version
                else:
                    self.failed.add(self.adapter.adapter_id)
                self.call, self.step = None, "load" if self.loads else "unload"
            case "unload":
                self.promised = 0
                self.step = "end"
                with suppress(SlipstreamError):  # no load succeeded
                    self.call, self.step = ledger.unload_adapter(self.name, now), "unloaded"
            case "unloaded":
                self.unloaded, self.call, self.step = True, None, "end"

    def loses_its_call(self) -> None:
        if self.call is not None:
            following = "load" if self.loads else "unload"
            self.call, self.step = None, "end" if self.step == "unloaded" else following

    @property
    def waits(self) -> bool:
        answered = self.call is None or self.call.done
        return self.step == "end" or (self.step in ("wait", "unloaded") and not answered)


@dataclass(slots=True)
class SmallFleet:
    """A ledger with replicas, a publisher that runs rounds, users of adapters, and a number of faults that
    may still happen. `loads`: so many of each of `names`."""

    count: int
    rounds: int
    faults: int
    loads: int = 0
    names: Sequence[str] = ("n",)
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
    users: list[AdapterUser] = field(init=False)

    def __post_init__(self) -> None:
        step = "load" if self.loads else "end"
        self.users = [AdapterUser(name, self.loads, step) for name in self.names]
        self.step = "open" if self.rounds else "end"
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
        yield from (("use_adapters", index) for index, user in enumerate(self.users) if not user.waits)
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
        if name not in CALM:
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
        self.ledger = Ledger(self.config, adapters=ONE_VERSION)
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
        for user in self.users:
            user.loses_its_call()

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

    def use_adapters(self, index: int) -> None:
        self.users[index].go_on(self.ledger, self.now)
        self.ledger.tick(self.now)
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

    def check(self) -> None:
        committed = max((each.version for each in self.journal if isinstance(each, Committed)), default=0)
        versions = {each.version for each in self.serving()}
        assert len(versions) <= 1, f"served at once: {versions}"
        assert all(version <= committed for version in versions), f"{versions}, the disk says {committed}"
        assert self.ledger.state.committed_version == committed
        catalogs = [each.catalog for each in self.journal if isinstance(each, Cataloged)]
        decided = {adapter.adapter_id for catalog in catalogs for adapter in catalog.live}
        followed = {each.incarnation for each in self.ledger.state.live()}
        for replica in self.serving():
            live = replica.adapters.live
            assert live.keys() <= decided, "requests may name what the disk does not"
            # One that is fenced may hold it until it learns so, and no request names it there.
            held = replica.adapters.held if replica.incarnation in followed else live
            for user in self.users:
                assert not user.failed & held.keys(), "a user was told that it failed"
                own = [each.version for each in live.values() if each.name == user.name]
                newest = max(own, default=0)
                assert newest >= user.promised, f"{replica.replica_id} lacks what a user was promised"
                assert not (user.unloaded and own), "its user was told that it is unloaded"

    def check_end(self) -> None:
        """With messages that arrive every round ends, and who is not fenced serves its version."""
        for _ in range(5 * (self.rounds + self.loads * len(self.users))):
            self.settle()
            if self.step != "end":
                assert self.call is None or self.call.done, "a publisher waits for ever"
                self.publish()
            for index, user in enumerate(self.users):
                if user.step != "end":
                    assert not user.waits, "a user of an adapter waits for ever"
                    self.use_adapters(index)
                    self.settle()
        self.settle()
        assert self.ledger.status(self.now).round is None, "a round does not end"
        committed = self.ledger.state.committed_version
        live = [each.adapter_id for each in self.ledger.state.adapters.catalog.live]
        fenced = any(seat.alive and seat.replica.fenced for seat in self.seats)
        if not fenced:  # it may read its adapters until it exits
            assert self.ledger.adapter_ids() == {*live}, "files stay for ever"
        for seat in self.seats:
            replica = seat.replica
            if seat.alive and replica.fenced is None:
                assert replica.version == committed or not replica.admitted
                assert not replica.held, f"{replica.replica_id} is held for ever"
                assert [*replica.adapters.live] == [*replica.adapters.held] == live
        assert {self.step, *(user.step for user in self.users)} == {"end"}
