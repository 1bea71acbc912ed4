"""The ledger's limits: how many replicas must stay, how long anyone may take, how a round commits."""

from pydantic import BaseModel, ConfigDict, Field

from deployments.protocol.instructions import (
    Body,
    Call,
    Commit,
    CommitMode,
    Forget,
    KvCache,
    Release,
    WriteVersion,
)
from deployments.protocol.operations import InFlight


class LedgerConfig(BaseModel):
    """`commit`, `kv_cache` and `in_flight` apply to rounds that do not set their own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_replicas: int = Field(default=1, ge=1)
    max_unavailable: int = Field(default=1, ge=1)
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    stage_timeout_s: float = Field(default=120.0, gt=0)
    commit_timeout_s: float = Field(default=60.0, gt=0)
    call_timeout_s: float = Field(default=60.0, gt=0)
    store_timeout_s: float = Field(default=600.0, gt=0)  # writing a version that only replicas hold
    grace_s: float = Field(default=5.0, ge=0)  # a replica may report its own timeout before it is fenced
    lease_s: float = Field(default=60.0, gt=0)
    commit: CommitMode = CommitMode.TOGETHER
    kv_cache: KvCache = KvCache.RECOMPUTE
    in_flight: InFlight = InFlight.KEEP

    def deadline_s(self, body: Body) -> float:
        """How long a replica may take over one instruction, from when the one before it was done."""
        match body:
            case Commit() | Release():
                return self.commit_timeout_s
            case Call() | WriteVersion() | Forget():
                return self.call_timeout_s
            case _:
                return self.stage_timeout_s
