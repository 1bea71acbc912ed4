"""What can happen to a ledger: replicas join, leave, fail and fall silent; the controller restarts; the
publisher and its users do their calls in any order. A virtual clock, no waits.
`test_ledger_walk` says what must hold.
"""

from contextlib import suppress

import hypothesis.strategies as st
from hypothesis.stateful import rule

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
from deployments.protocol.errors import Conflict, SlipstreamError
from deployments.protocol.publishing import RoundOptions
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.replica_moves import ReplicaMoves

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
        self.ledger = self.make_ledger(self.config)
        self.ledger.recover(self.journal, self.now)
        self.persist()
