"""Everything the ledger knows, as plain records; other modules are functions that change a `State`.

`State.now` is the current event's time; no module reads a clock.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

from pydantic import JsonValue

from deployments.ledger.decisions import KEPT_ROUNDS, Decision, Fenced, Founded, Participant, Stored
from deployments.protocol import poll
from deployments.protocol.adapters import Adapter, AdapterCatalog, AdapterTimings
from deployments.protocol.engine_state import EngineState, InFlight, Operation
from deployments.protocol.errors import SlipstreamError
from deployments.protocol.ledger_config import AdapterLimits, LedgerConfig, SizeLimits
from deployments.protocol.publishing import Lease, RoundReport
from deployments.protocol.responses import Event
from deployments.protocol.routing import ReplicaEndpoint

FIRST_PATIENCE_S = 1.0
KEPT_EVENTS = 1000
ID_SPAN = 10**9
UNKNOWN = -1


class MemberState(StrEnum):
    RETURNING = "returning"  # a member before the controller restarted; has not polled since
    JOINING = "joining"  # alive, takes no requests yet
    SERVING = "serving"
    FENCED = "fenced"  # never serves again; not gone yet
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    state: MemberState
    last_seq: int
    may_leave: bool
    desired: poll.DesiredReplicas


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    replica_id: str
    incarnation: str
    world_size: int
    version: int
    state: MemberState
    last_poll: float
    reason: str = ""
    queue: list["QueuedInstruction"] = field(default_factory=list)
    delivered: Delivered | None = None
    was_serving: bool = False
    engine_state: EngineState = ()
    retained_version: int | None = None  # it retains these tensors for the store
    store_result: poll.StoreResult | None = None
    endpoint: ReplicaEndpoint | None = None
    initial: poll.InitialWeights | None = None  # what it loaded as version 0
    loading_version: int | None = None  # reported; an earlier controller may have told it to
    patience_s: float = FIRST_PATIENCE_S  # waits so long for a round, then loads from the store
    last_report: int = 0
    failed_transfers: int = 0  # consecutive failures while others received
    updates_in_place: bool = False  # RECEIVE changes its live weights
    draining: poll.Draining | None = None
    leaving: bool = False
    drained: bool = False
    adapters: tuple[int, ...] = ()  # ids that it holds
    adapters_number: int = 0  # the `AdapterLoads.number` that it has carried out
    fence_delivered: bool = False  # it knows that it is fenced; until then it may still take a request

    @property
    def alive(self) -> bool:
        return self.state in (MemberState.JOINING, MemberState.SERVING)

    @property
    def out(self) -> bool:
        return self.state in (MemberState.FENCED, MemberState.LOST)

    @property
    def loading(self) -> bool:
        told = any(each.delivered and isinstance(each.body, poll.CatchUp) for each in self.queue)
        return told or self.loading_version is not None

    @property
    def departing(self) -> bool:
        return self.leaving and self.drained

    @property
    def participant(self) -> Participant:
        return Participant(
            replica_id=self.replica_id, incarnation=self.incarnation, world_size=self.world_size
        )

    def has_queued(self, *kinds: type[poll.Body]) -> bool:
        return any(isinstance(queued.body, kinds) for queued in self.queue)


OnComplete = Callable[["State", "PendingCall"], None]


@dataclass(slots=True, kw_only=True, eq=False)
class PendingCall:
    """Complete when each member has answered or is out.

    `certain`: a fenced member counts once its fence is delivered. `batch`: members of this and other calls,
    where nothing follows before all are complete.
    """

    name: str
    waiting: set[Member] = field(default_factory=set)
    on_complete: OnComplete | None = None
    certain: bool = False
    batch: set[Member] | None = None
    round_id: int | None = None
    answers: dict[str, poll.Acknowledgement] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  # replica id -> why it did not answer
    done: bool = False
    error: SlipstreamError | None = None
    result: Any = None

    def stop_waiting_for(self, member: Member) -> None:
        self.waiting.discard(member)
        if self.batch is not None:
            self.batch.discard(member)

    def finish(self, result: Any = None, error: SlipstreamError | None = None) -> None:
        if not self.done:
            self.done, self.result, self.error = True, result, error


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedInstruction:
    instruction: poll.Instruction
    call: PendingCall | None
    due: float = math.inf  # from when it is first in the queue
    delivered: bool = False

    @property
    def body(self) -> poll.Body:
        return self.instruction.body


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    done: frozenset[str]
    rejected: Mapping[str, str]
    transfer_failed: Mapping[str, str]
    replica_failed: Mapping[str, str]

    @property
    def publisher_at_fault(self) -> bool:
        return bool(self.rejected) and not self.done

    @property
    def not_done(self) -> dict[str, str]:
        return {**self.rejected, **self.transfer_failed, **self.replica_failed}

    @property
    def to_fence(self) -> dict[str, str]:
        return {**self.replica_failed, **({} if self.publisher_at_fault else self.rejected)}


def classify(call: PendingCall) -> Verdict:
    reasons: dict[poll.Outcome, dict[str, str]] = {outcome: {} for outcome in poll.Outcome}
    for replica_id, answer in call.answers.items():
        reasons[answer.outcome][replica_id] = answer.message or f"{call.name} {answer.outcome.value}"
    return Verdict(
        done=frozenset(reasons[poll.Outcome.DONE]),
        rejected=reasons[poll.Outcome.REJECTED],
        transfer_failed=reasons[poll.Outcome.TRANSFER_FAILED],
        replica_failed=reasons[poll.Outcome.REPLICA_FAILED],
    )


def join_reasons(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{replica_id}: {reason}" for replica_id, reason in reasons.items())


@dataclass(slots=True, kw_only=True, eq=False)
class PendingDrain:
    drain_id: str
    call: PendingCall
    due: float
    late: dict[str, int] = field(default_factory=dict)  # replica id -> requests that ran at the deadline


@dataclass(slots=True, kw_only=True, eq=False)
class PendingOperation:
    operation: Operation
    of_one: bool = False
    drain_id: str = ""
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Connection:
    """Collective (`rank_offset` in its `init_info`): one communicator for exactly these members, whose
    workers are ranked in order of registration."""

    publisher: str
    init_info: Mapping[str, JsonValue]
    rank_offset: int | None
    members: tuple[Member, ...]

    @property
    def collective(self) -> bool:
        return self.rank_offset is not None

    def connect_body(self, member: Member) -> poll.Connect:
        if self.rank_offset is None:
            return poll.Connect(init_info=self.init_info)
        first = first_ranks(self.members)[self.members.index(member)]
        return poll.Connect(init_info={**self.init_info, "rank_offset": self.rank_offset + first})

    def missing(self, call: PendingCall) -> dict[str, str]:
        """By id: members that did not answer peers in a failed transfer, and their accusers."""
        if self.rank_offset is None:
            return {}
        said: dict[str, set[str]] = {}
        for member, first in zip(self.members, first_ranks(self.members), strict=True):
            ranks = range(self.rank_offset + first, self.rank_offset + first + member.world_size)
            for replica_id, answer in call.answers.items():
                if replica_id != member.replica_id and any(rank in ranks for rank in answer.missing_ranks):
                    said.setdefault(member.replica_id, set()).add(replica_id)
        return {named: f"missed by {sorted(by)}" for named, by in said.items()}


def first_ranks(members: Sequence[Member]) -> list[int]:
    return list(accumulate((member.world_size for member in members), initial=0))[:-1]


class RoundPhase(StrEnum):
    OPEN = "open"
    VERIFYING = "verifying"  # closed; digests are awaited
    VERIFIED = "verified"  # waiting only for replicas that may serve without consent
    DRAINING = "draining"  # `in_flight: wait`: running requests finish
    COMMITTING = "committing"  # decided: only rolls forward from here
    RELEASING = "releasing"  # all have swapped and hold; they are resumed
    COMMITTED = "committed"
    ABORTED = "aborted"


class RoundPart(StrEnum):
    OPEN = "open"
    SEND = "send"
    STAGE = "stage"
    VERIFY = "verify"
    DRAIN = "drain"
    COMMIT = "commit"


DECIDED = (RoundPhase.COMMITTING, RoundPhase.RELEASING, RoundPhase.COMMITTED)


@dataclass(slots=True, kw_only=True, eq=False)
class Round:
    round_id: int
    version: int
    label: str | None
    epoch: int
    opened_at: float
    participants: tuple[Member, ...]
    connection: Connection | None
    commit: poll.CommitMode
    kv_cache: poll.KvCache
    in_flight: InFlight
    persist: bool = False
    file_bytes: int | None = None  # its payloads are `FilePart`s; see `RoundOptions`
    sent_bytes: int = 0
    phase: RoundPhase = RoundPhase.OPEN
    checks: tuple[poll.Check, ...] = ()
    digest: str | None = None  # all tensors, agreed on by the participants
    drafter: int | None = None
    close: PendingCall | None = None
    commits: dict[Member, PendingCall] = field(default_factory=dict)
    ordered: set[Member] = field(default_factory=set)
    swapping: set[Member] = field(default_factory=set)  # `together`: COMMIT is waited for
    staged: dict[str, poll.Staged] = field(default_factory=dict)
    swapped: dict[str, poll.Swapped] = field(default_factory=dict)
    publisher: str = ""
    committed_at: float | None = None
    part: RoundPart = RoundPart.OPEN
    part_since: float = 0.0
    parts: dict[RoundPart, float] = field(default_factory=lambda: dict.fromkeys(RoundPart, 0.0))
    decided_for: int = 0  # participants of a decision that a restart resumes; some may be fenced since
    drained: bool = False
    not_drained: dict[str, int] = field(default_factory=dict)
    left_behind: dict[str, str] = field(default_factory=dict)

    @property
    def decided(self) -> bool:
        return self.phase in DECIDED

    @property
    def hold(self) -> bool:
        """Whether replicas, including those a restart forgot, wait for each other after their swap."""
        return self.commit is poll.CommitMode.TOGETHER and max(self.decided_for, len(self.participants)) > 1

    @property
    def must_drain(self) -> bool:
        return self.in_flight is InFlight.WAIT and not self.drained

    def remaining(self) -> list[Member]:
        return [member for member in self.participants if member.alive]

    def go_on(self, part: RoundPart, now: float) -> None:
        self.parts[self.part] += now - self.part_since
        self.part, self.part_since = part, now

    def record(self, call: PendingCall) -> None:
        for replica_id, answer in call.answers.items():
            if isinstance(answer.value, poll.Staged):
                self.staged[replica_id] = answer.value
            elif isinstance(answer.value, poll.Swapped):
                self.swapped[replica_id] = answer.value


@dataclass(slots=True, kw_only=True)
class PublisherState:
    lease: Lease | None = None
    shared: bool = False  # the lease is of calls without a token
    expires: float = 0.0
    last_token: int = 0
    connection: Connection | None = None
    rendezvous: tuple[Connection, PendingCall] | None = None
    told: set[Member] = field(default_factory=set)  # they have, or were told of, the connection
    broken_by: int | None = None  # the round with which the last transfer group ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    replica_id: str
    version: int
    reason: str
    since: float


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """Undecided: what it brings is nowhere live."""

    adapter: Adapter
    begun: float
    staged: float = 0.0
    stored: bool = False
    call: PendingCall | None = None  # None: its files are being copied
    rejected: dict[str, str] = field(default_factory=dict)
    error: SlipstreamError | None = None

    @property
    def wanted(self) -> bool:
        return self.call is not None and self.error is None and not self.rejected


@dataclass(slots=True, kw_only=True)
class AdapterLoads:
    catalog: AdapterCatalog = field(default_factory=AdapterCatalog)
    loads: dict[str, Load] = field(default_factory=dict)
    # Calls that wait for replicas, each with its change's number; None: an unload
    decided: list[tuple[int, PendingCall, Load | None]] = field(default_factory=list)
    timings: dict[int, AdapterTimings] = field(default_factory=dict)
    number: int = 0  # counts changes of what replicas must hold, by this process; 1: an earlier one's


@dataclass(slots=True, kw_only=True)
class Proof:
    """Scores of one version, by replica id; `due` None: they have been compared."""

    version: int = -1
    due: float | None = None
    replicas: dict[str, tuple[float, ...]] = field(default_factory=dict)
    adapters: dict[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)  # keys: NAME@VERSION
    trainer: tuple[float, ...] | None = None
    told: set[tuple[str, str, bool]] = field(default_factory=set)


@dataclass(slots=True, kw_only=True, eq=False)
class State:
    config: LedgerConfig
    size_limits: SizeLimits
    adapter_limits: AdapterLimits
    desired: poll.DesiredReplicas
    now: float = 0.0
    wall: float = 0.0  # `now` + `wall` is seconds since 1970
    decisions: list[Decision] = field(default_factory=list)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    next_event_id: int = 1

    members: dict[str, Member] = field(default_factory=dict)  # replica id -> member, in order of registration
    fences: OrderedDict[str, Fenced] = field(
        default_factory=OrderedDict
    )  # incarnation -> fence, never lifted
    epoch: int = 0
    next_seq: int = 1
    pending: list[PendingCall] = field(default_factory=list)
    drains: list[PendingDrain] = field(default_factory=list)  # replicas stay drained until `forget_drain`

    founded: Founded | None = None
    committed_version: int = 0
    drafter: int | None = None
    label: str | None = None
    persist: bool = False
    stored: Stored | None = None
    round: Round | None = None
    last_round_id: int = 0
    last_round_end: float = -math.inf
    history: deque[RoundReport] = field(default_factory=lambda: deque(maxlen=KEPT_ROUNDS))
    round_errors: OrderedDict[int, SlipstreamError] = field(default_factory=OrderedDict)

    publisher: PublisherState = field(default_factory=PublisherState)
    engine_state: EngineState = ()
    durable_engine_state: EngineState = ()  # what a successor would recover
    operations: dict[PendingCall, PendingOperation] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    unwritten: tuple[int, str] | None = None  # the version that its publisher could not write, and why
    adapters: AdapterLoads = field(default_factory=AdapterLoads)
    proof: Proof = field(default_factory=Proof)

    def decide(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def found(self, founded: Founded) -> None:
        self.founded = founded
        self.decide(founded)

    def record(self, event: str, **fields: JsonValue) -> None:
        self.events.append(Event(event_id=self.next_event_id, name=event, at=self.now, fields=fields))
        self.next_event_id += 1

    @property
    def fleet_id(self) -> str:
        return "" if self.founded is None else self.founded.fleet_id

    @property
    def initial(self) -> poll.InitialWeights | None:
        return None if self.founded is None or self.committed_version else self.founded.initial

    @property
    def stored_version(self) -> int:
        """Version 0, the first checkpoint, needs no store."""
        return 0 if self.stored is None else self.stored.version

    @property
    def unstored(self) -> int | None:
        """The committed version, if a replica must still store it."""
        pending = self.persist and self.stored_version < self.committed_version
        return self.committed_version if pending else None

    def retains(self, current: Round) -> bool:
        return current.persist or not self.config.shared_store

    def digest_of(self, version: int) -> str | None:
        reports = (each for each in reversed(self.history) if each.version == version)
        return next((each.digest for each in reports if each.phase == RoundPhase.COMMITTED), None)

    @property
    def needed(self) -> int:
        """`min_replicas`, but no more than desired."""
        limits, wanted = self.size_limits, self.desired.wanted
        if limits.fixed is not None:
            return self.config.min_replicas
        return min(self.config.min_replicas, limits.least if wanted is None else wanted)

    def find(self, replica_id: str, incarnation: str) -> Member | None:
        member = self.members.get(replica_id)
        return member if member is not None and member.incarnation == incarnation else None

    def live(self) -> list[Member]:
        return [member for member in self.members.values() if member.alive and not member.departing]

    def serving(self) -> list[Member]:
        return [each for each in self.live() if each.state is MemberState.SERVING]

    def for_round(self) -> list[Member]:
        """For a new round or connection; members that are loading a version only if needed."""
        ready = [member for member in self.live() if not member.loading]
        return ready if len(ready) >= self.needed else self.live()

    def returning(self) -> list[Member]:
        return [member for member in self.members.values() if member.state is MemberState.RETURNING]

    def uncertain(self) -> list[Member]:
        """May take requests without the ledger's consent."""
        return [
            member
            for member in self.members.values()
            if member.state is MemberState.RETURNING
            or (member.state is MemberState.FENCED and not member.fence_delivered)
        ]

    def credit(self, stalled_s: float) -> None:
        """The controller stalled and heard no replica: extend every deadline."""
        for member in self.members.values():
            member.last_poll += stalled_s
            for queued in member.queue:
                queued.due += stalled_s
        for drain in self.drains:
            drain.due += stalled_s
        self.publisher.expires += stalled_s
        if self.proof.due is not None:
            self.proof.due += stalled_s
