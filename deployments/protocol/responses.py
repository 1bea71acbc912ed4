"""The JSON bodies of our own HTTP routes; clients read the same types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from deployments.protocol.adapters import AdapterStatus
from deployments.protocol.poll import InitialWeights
from deployments.protocol.publishing import RoundReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetails:
    type: str
    message: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    error: ErrorDetails


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    status: str  # ok | starting
    serving: int
    members: int
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    replica_id: str
    incarnation: str
    state: str  # returning | joining | serving | leaving | fenced
    admitted: bool
    version: int
    world_size: int
    silent_s: float
    pending: Sequence[str]
    reason: str
    draining: bool = False
    running: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStatus:
    round_id: int
    version: int
    label: str | None
    phase: str
    age_s: float
    participants: Sequence[str]
    file_bytes: int | None = None  # size of the files that the version is read from; None: it is sent
    sent_bytes: int = 0  # the part of them that replicas were told to read so far


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatus:
    publisher: str
    remaining_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeStatus:
    wanted: int | None  # None: as many as the load needs, between `least` and `most`
    least: int
    most: int
    running: int
    joining: int
    leaving: int
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    fleet_id: str  # identifies the state directory; in the manifests of its versions
    committed_version: int
    label: str | None
    stored_version: int | None
    epoch: int
    ready: bool
    min_replicas: int
    size: SizeStatus
    workers: int  # TP x PP x DP workers of all live replicas
    members: Sequence[MemberStatus]
    round: RoundStatus | None
    lease: LeaseStatus | None
    connected: str | None  # the publisher whose connection to the replicas is usable
    store_problem: str | None  # why the committed version will not get into the store
    condition: Sequence[str]  # the operations that lead a fresh engine to the fleet's engine state
    rounds_ended: Mapping[str, int] = field(default_factory=dict)  # outcome -> rounds since the first start
    initial: InitialWeights | None = None  # what version 0 is, while the fleet is at it; None: not known
    drafter: int | None = None  # the committed version's, see `RoundReport`; None: also before the first


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    rounds: Sequence[RoundReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersions:
    versions: Sequence[int]  # oldest first


# Counters of a replica's process, with the label `version`.
DRAFTED, ACCEPTED = "slipstream_drafted_tokens_total", "slipstream_accepted_draft_tokens_total"
DRAFTING_OFF = "slipstream_drafting_off"  # its gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    generated_tokens: int  # since its engine started
    running: int
    waiting: int
    kv_cache_use: float  # 0 to 1; of the fullest engine
    drafted_tokens: int = 0  # speculative decoding, since its version is live
    accepted_tokens: int = 0  # the accepted part of `drafted_tokens`
    drafting_off: bool = False  # until the next version: too few are accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    at: float  # seconds since 1970
    replicas: Mapping[str, ReplicaLoad]
    dashboard: str | None  # the address of Ray's dashboard on the head node


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterList:
    adapters: Sequence[AdapterStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    event_id: int
    name: str
    at: float  # seconds: the controller's clock inside it, since the epoch outside
    fields: Mapping[str, JsonValue]

    def body(self) -> dict[str, JsonValue]:
        return {"id": self.event_id, "event": self.name, "at": self.at, **self.fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    status: str  # paused | resumed; ok: an adapter is loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSize:
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCounts:
    """The body of `/rollouts`."""

    states: Mapping[str, int]
    ends: Mapping[str, int]  # groups: consumed | discarded | unrewarded | expired | stale | a job's reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    next: int
    open: Sequence[str]
    ready: int
    ends: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenRollout:
    """`sequences` have the fields of `trainers.trajectory.Trajectory` but `advantage`, and `turns`:
    the place of each answer, its adapter, finish reason and sampling parameters."""

    id: str
    reward: float | Sequence[float | Sequence[float]]
    info: str
    sequences: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenGroup:
    group: str
    rollouts: Sequence[TakenRollout]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenStep:
    """The body of `/rollouts/take`; `step` is None while there are fewer groups than it asks for."""

    step: str | None
    stale_groups: int
    ready_groups: int
    groups: Sequence[TakenGroup]
    left_groups: int  # groups that the same call returns with `offset`


StepMetrics = Mapping[str, float | int | bool | None]  # one optimizer step; None: not a finite number


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSample:
    text: str
    reward: float
    versions: Sequence[tuple[int, int]]  # (version, tokens), in the order in which they were sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    run: str  # the job's name for its run; empty: the trainer's own
    step: int
    values: StepMetrics
    rollouts: Sequence[RolloutSample] = ()
    at: float = 0.0  # seconds since 1970; each entry has a greater one than those before


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    steps: Sequence[StepEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    path: str
    step: int
    save_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    name: str  # requests name it so, or as NAME@VERSION
    version: int
    label: str | None
    step: int
    base_version: int
    digest: str
    size_bytes: int
    write_s: float
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    step: int
    version: int
    doing: str | None
    doing_s: float
    strategy: str
    world_size: int
    transport: str
    parameters: int  # elements over all ranks; only the adapter's if it trains one
    last_step: StepMetrics
    last_round: RoundReport | None
    stored_version: int | None
    store_problem: str | None  # why the version written last is not in the store
    missed: str | None = (
        None  # why it has not the fleet's version, and what to do; it does nothing until then
    )
    untrained: tuple[str, ...] = ()  # checkpoint tensors that replicas keep as loaded, in words
    adapter: str | None = None
    adapter_version: int = 0  # the newest that it published or resumed from; 0: none
    last_adapter: AdapterReport | None = None
