"""The ledger's limits: how many replicas there are to be and must stay, how long anyone may take, how a round
commits.
"""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from deployments.ledger.decisions import DecisionLog, EventLog, Scaled
from deployments.ledger.members import Member, MemberState
from deployments.protocol.adapters import DropAdapter, LoadAdapter, SetAdapters
from deployments.protocol.engine_state import InFlight
from deployments.protocol.errors import Conflict, InvalidRequest
from deployments.protocol.poll import (
    Body,
    Call,
    CatchUp,
    Commit,
    CommitMode,
    DesiredReplicas,
    Drain,
    EndDrain,
    Forget,
    KvCache,
    Release,
    WriteVersion,
)
from deployments.protocol.publishing import DrainFallback
from deployments.protocol.responses import SizeStatus


class SizeLimits(BaseModel):
    """How many replicas the fleet may have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    least: int = Field(default=1, ge=1)
    most: int = Field(default=1, ge=1)
    wanted: int | None = None  # until the operator says otherwise; None: as many as the load needs
    fixed: str | None = "'engine.max_replicas' is not set"  # why the number cannot change


FIXED = SizeLimits()


class FleetSize:
    """How many replicas the operator wants. It is durable before a replica learns of it."""

    def __init__(self, limits: SizeLimits, decisions: DecisionLog, events: EventLog) -> None:
        self._limits = limits
        self._decisions = decisions
        self._events = events
        self.desired = DesiredReplicas(wanted=limits.wanted)

    def recover(self, decision: Scaled) -> None:
        self.desired = DesiredReplicas(wanted=decision.wanted, number=decision.number)

    def needed(self, min_replicas: int) -> int:
        """Participants that a round needs: `min_replicas`, but never more than the fleet is meant to have."""
        limits, wanted = self._limits, self.desired.wanted
        if limits.fixed is not None:
            return min_replicas
        return min(min_replicas, limits.least if wanted is None else wanted)

    def want(self, wanted: int | None, room: int | None, now: float, members: Sequence[Member]) -> SizeStatus:
        """Have so many replicas from now on; None: as many as the load needs.

        Args:
            room: replicas that the cluster's GPUs hold; None: not known.

        Raises:
            Conflict: the number is fixed.
            InvalidRequest: outside the configured bounds, or more than the cluster holds.
        """
        limits = self._limits
        if limits.fixed is not None:
            raise Conflict(f"the number of replicas is fixed: {limits.fixed}", {"most": limits.most})
        if wanted is not None and not limits.least <= wanted <= limits.most:
            raise InvalidRequest(
                f"replicas: expected {limits.least} to {limits.most} ('engine.min_replicas' and "
                f"'engine.max_replicas'), got {wanted}",
                {"least": limits.least, "most": limits.most, "actual": wanted},
            )
        if wanted is not None and room is not None and wanted > room:
            raise InvalidRequest(
                f"replicas: expected at most {room}, which is what the cluster's GPUs hold, got {wanted}",
                {"room": room, "actual": wanted},
            )
        self.desired = DesiredReplicas(wanted=wanted, number=self.desired.number + 1)
        self._decisions.append(Scaled(wanted=wanted, number=self.desired.number))
        self._events.record("scale", now, wanted=wanted)
        return self.status(members)

    def status(self, members: Sequence[Member]) -> SizeStatus:
        """The numbers for `/fleet`."""
        leaving = sum(each.leaving for each in members if each.alive)
        running = sum(each.state is MemberState.SERVING and not each.leaving for each in members)
        joining = sum(each.state is MemberState.JOINING and not each.leaving for each in members)
        limits, wanted = self._limits, self.desired.wanted
        missing = 0 if wanted is None else wanted - running - joining
        problem = f"{missing} of {wanted} replicas have not registered yet: they start, or wait for free GPUs"
        return SizeStatus(
            wanted=wanted,
            least=limits.least,
            most=limits.most,
            running=running,
            joining=joining,
            leaving=leaving,
            problem=problem if missing > 0 else None,
        )


class LedgerConfig(BaseModel):
    """How long each step may take, and how a round commits; an operator sets `WeightsConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    commit: CommitMode = CommitMode.TOGETHER
    kv_cache: KvCache = KvCache.RECOMPUTE
    in_flight: InFlight = InFlight.KEEP
    min_replicas: int = Field(default=1, ge=1)
    max_unavailable: int = Field(default=1, ge=1)
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    stage_timeout_s: float = Field(default=120.0, gt=0)
    commit_timeout_s: float = Field(default=60.0, gt=0)
    drain_timeout_s: float = Field(default=120.0, gt=0, le=300)
    lease_s: float = Field(default=60.0, gt=0)
    # Constants; tests make them shorter.
    call_timeout_s: float = Field(default=60.0, gt=0)
    drain_fallback: DrainFallback = DrainFallback.ABORT  # of rounds that do not choose
    store_timeout_s: float = Field(default=600.0, gt=0)  # writing a version that only replicas hold
    catch_up_timeout_s: float = Field(default=1800.0, gt=0)  # loading a stored version, beside rounds
    join_timeout_s: float = Field(default=3600.0, gt=0)  # a joiner's version stays in the store for so long
    grace_s: float = Field(default=5.0, ge=0)  # a replica may report its own timeout before it is fenced

    def deadline_s(self, body: Body) -> float:
        """How long a replica may take over one instruction, from when the one before it was done."""
        match body:
            case Commit() | Release():
                return self.commit_timeout_s
            case CatchUp():
                return self.catch_up_timeout_s
            case LoadAdapter() | SetAdapters() | DropAdapter():
                return self.call_timeout_s
            case Call() | WriteVersion() | Forget() | Drain() | EndDrain():
                return self.call_timeout_s
            case _:
                return self.stage_timeout_s
